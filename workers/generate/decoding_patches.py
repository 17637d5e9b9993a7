"""Patches of Megatron's layers while tokens are generated, as context managers that undo themselves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.utils import set_model_to_sequence_parallel
from torch import Tensor, nn

from workers.model.local_attention import TEDotProductAttention

__all__ = [
    "last_position_only",
    "padding_masked_in_transformer_engine",
    "rotated_key_cache",
    "without_sequence_parallelism",
]


@contextlib.contextmanager
def without_sequence_parallelism(chunks: Sequence[Any]) -> Iterator[None]:
    """Disable sequence parallelism: the one new token of a step cannot be divided over tp."""
    divided = [chunk for chunk in chunks if chunk.config.sequence_parallel]
    for chunk in divided:
        set_model_to_sequence_parallel(chunk, False)
    try:
        yield
    finally:
        for chunk in divided:
            set_model_to_sequence_parallel(chunk, True)


@contextlib.contextmanager
def padding_masked_in_transformer_engine(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Make Transformer Engine apply the attention mask, which it does only if the mask's type is ``arbitrary``.

    Megatron passes the type ``causal`` for the prompt, and then none.
    """

    def set_mask_type(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        mask = args[3] if len(args) > 3 else kwargs.get("attention_mask")
        if mask is not None:
            kwargs["attn_mask_type"] = AttnMaskType.arbitrary
        return args, kwargs

    cores = [
        module
        for chunk in chunks
        for name, module in chunk.named_modules()
        if name.endswith("core_attention") and not isinstance(module, TEDotProductAttention)
    ]
    handles = [core.register_forward_pre_hook(set_mask_type, with_kwargs=True) for core in cores]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def last_position_only(chunks: Sequence[Any]) -> Iterator[None]:
    """Compute the feed-forward part of the last layer only for the last position, which alone is read after it.

    Layers with experts compute all positions, since which tokens they drop may depend on how many there are.
    """
    last = [layer for chunk in chunks if chunk.post_process for layer in chunk.decoder.layers[-1:]]
    dense = [layer for layer in last if isinstance(layer.mlp, MLP)]
    for layer in dense:
        layer._forward_mlp = functools.partial(_forward_last_position, layer)
    try:
        yield
    finally:
        for layer in dense:
            del layer._forward_mlp


def _forward_last_position(layer: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    return type(layer)._forward_mlp(layer, hidden[-1:], *args, **kwargs)


@contextlib.contextmanager
def rotated_key_cache(chunks: Sequence[Any]) -> Iterator[None]:
    """Rotate each key once, before it is cached.

    Megatron caches keys before their rotary positions are applied, and rotates all of them again for every new token,
    so that the cost of a token grows. For the local attention, cached keys and values are also laid out in memory in
    the order in which it reads them.
    """
    rotary = [chunk for chunk in chunks if chunk.position_embedding_type == "rope"]
    attentions = [module for chunk in rotary for module in chunk.modules() if isinstance(module, SelfAttention)]
    rotation = _Rotation()
    for attention in attentions:
        attention._adjust_key_value_for_inference = functools.partial(_cache_rotated, attention, rotation)
    try:
        yield
    finally:
        for attention in attentions:
            del attention._adjust_key_value_for_inference


def _cache_rotated(
    attention: Any,
    rotation: _Rotation,
    cache: StaticInferenceContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Any,
    *rest: Any,
) -> tuple[Any, ...]:
    if rotary is not None:
        query, key = rotation.rotate(attention, (query, key), rotary[0], cache.sequence_len_offset)
    memory = cache.key_value_memory_dict
    if attention.layer_number not in memory and isinstance(attention.core_attention, TEDotProductAttention):
        memory[attention.layer_number] = tuple(
            _empty_cache(tensor, cache.max_sequence_length) for tensor in (key, value)
        )
    adjust = type(attention)._adjust_key_value_for_inference
    return adjust(attention, cache, query, key, value, None, *rest)


class _Rotation:
    """Rotary positions as Megatron applies them; cosines and sines are computed once for all layers and tokens."""

    def __init__(self) -> None:
        self.angles: Tensor | None = None
        self.cosines = self.sines = torch.empty(0)

    def rotate(self, attention: Any, heads: Sequence[Tensor], angles: Tensor, start: int) -> list[Tensor]:
        """Rotate every one of ``heads``.

        Args:
            attention: the Megatron attention module that they belong to.
            heads: queries and keys, each ``[seq, batch, heads, width]``.
            angles: ``[positions, 1, 1, width]``; a smaller width leaves the rest of every head unchanged.
            start: position of the first token.
        """
        config, end = attention.config, start + heads[0].size(0)
        if config.rotary_interleaved or config.apply_rope_fusion or angles.size(-1) < heads[0].size(-1):
            here, cp_group = angles[start:end], attention.pg_collection.cp
            return [apply_rotary_pos_emb(each, here, config=config, cp_group=cp_group) for each in heads]
        if self.angles is not angles:
            sines = angles.sin().to(heads[0].dtype)
            self.angles, self.cosines = angles, angles.cos().to(heads[0].dtype)
            self.sines = torch.cat((-sines[..., : sines.size(-1) // 2], sines[..., sines.size(-1) // 2 :]), -1)
        cosines, sines = self.cosines[start:end], self.sines[start:end]
        return [torch.addcmul(each * cosines, each.roll(each.size(-1) // 2, -1), sines) for each in heads]


def _empty_cache(first: Tensor, length: int) -> Tensor:
    """``[length, batch, heads, width]`` for ``first`` and what follows it, contiguous in memory for each head."""
    _, batch, heads, width = first.shape
    return first.new_empty(batch, heads, length, width).permute(2, 0, 1, 3)
