"""Patches of Megatron's layers while tokens are generated, as context managers that undo themselves."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import set_model_to_sequence_parallel
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mcontroller.errors import ConfigError
from parallel_state.dry_run import transformer_engine
from workers.model.attend_once import attend_once
from workers.model.local_attention import TEDotProductAttention, attention_window

# Fields with which layers compute attention that a cache of keys and values for every layer does not.
_PLAIN = {"window_attn_skip_freq": (None,), "softmax_type": ("vanilla",), "experimental_attention_variant": (None,)}
_ROTARY = ("rope", "yarn")  # the position embeddings whose angles depend on one position


def check_attention(config: TransformerConfig) -> None:
    """Check that Megatron's generation computes the attention of the layers.

    Raises:
        ConfigError: windows differ between layers, or there are learned sinks, or layers without attention.
    """
    differing = [name for name, plain in _PLAIN.items() if getattr(config, name, plain[0]) not in plain]
    if isinstance(getattr(config, "window_size", None), int):
        differing.append("window_size")
    if differing:
        raise ConfigError(
            f"the model has {', '.join(f'{name}={getattr(config, name)!r}' for name in differing)}, which Megatron's "
            "generation does not compute: use rollout.engine=vllm",
            key="rollout.engine",
            value="megatron",
        )


def check_positions(chunks: Sequence[Any]) -> None:
    """Check that each row can have its own positions, as prompts of unequal length need.

    Raises:
        ConfigError: a layer rotates cached keys by their columns, or positions have several dimensions.
    """
    for chunk in chunks:
        position, attentions = chunk.position_embedding_type, [m for m in chunk.modules() if isinstance(m, Attention)]
        rotates = position in _ROTARY and all(
            isinstance(attention, SelfAttention | MLASelfAttention) for attention in attentions
        )
        if not rotates and position not in ("learned_absolute", "none"):
            names = sorted({type(attention).__name__ for attention in attentions})
            raise ConfigError(
                f"{type(chunk).__name__} has {', '.join(names)} with position_embedding_type={position!r}, for which "
                "Megatron's generation takes prompts of one length only: generate one length at a time, or override "
                "build_rollout",
                key="position_embedding_type",
                value=position,
            )


@contextlib.contextmanager
def unfused_rotation(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Disable ``apply_rope_fusion``: its kernel rotates all rows by the same position."""
    fused = [config for config in map(get_model_config, chunks) if config.apply_rope_fusion]
    for config in fused:
        config.apply_rope_fusion = False
    try:
        yield
    finally:
        for config in fused:
            config.apply_rope_fusion = True


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


class TokenPositions:
    """The tokens of the current pass; all rows are the same unless one of these is set.

    Attributes:
        last: ``[rows]`` int64, the column of each row's last token, in a pass over prompts padded on the right.
        new: ``[rows]`` int64, the position of each row's only token in its sequence, in a later pass.
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.new: Tensor | None = None

    def select_last(self, hidden: Tensor) -> Tensor:
        """Return each row's last position ``[1, rows, hidden]`` of ``[seq, rows, hidden]``."""
        if self.last is None:
            return hidden[-1:]
        return hidden[self.last, torch.arange(len(self.last), device=hidden.device)][None]

    def select_angles(self, angles: Tensor, start: int, length: int) -> Tensor:
        """Return the angles of the pass, ``[seq, 1 or rows, 1, width]`` of ``[positions, 1, 1, width]``."""
        return angles[start : start + length] if self.new is None else angles[self.new].transpose(0, 1)


@contextlib.contextmanager
def masked_decoding(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Compute the attention of one new token by plain products, to all keys or to the keys that are not masked.

    With cuDNN, Transformer Engine builds a plan for every number of keys: for every token of a response. It masks
    single keys only with the mask type ``arbitrary``, which turns its flash and fused kernels off and repeats keys for
    all heads that share them. ``attend_once`` does neither. A core attention of another class, or with offsets or with
    windows in some layers, gets the mask with this type: ``[rows, 1, 1, keys]``, for one query per row. A window of all
    layers is part of the mask.
    """
    cores: list[Any] = []
    modules: Iterator[Any] = (module for chunk in chunks for module in chunk.modules())
    for attention in modules:
        core = getattr(attention, "core_attention", None)
        if isinstance(core, nn.Module) and not isinstance(core, TEDotProductAttention):
            # Multi-latent attention has a scale of its own, which depends on YaRN's factor.
            scale = getattr(attention, "softmax_scale", None) or get_model_config(core).softmax_scale
            core.forward = functools.partial(_attend_to_allowed_keys, core, scale)
            cores.append(core)
    try:
        yield
    finally:
        for core in cores:
            del core.forward


def _attend_to_allowed_keys(
    core: Any,
    scale: float | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    forward = functools.partial(type(core).forward, core, query, key, value, attention_mask)
    engine = type(core).__module__.startswith("megatron.core.extensions.")
    if engine and query.size(0) == 1 and _is_plain(core.config, attention_mask):
        allowed = None if attention_mask is None else ~attention_mask
        return attend_once(query, key, value, allowed, scale or 1.0 / math.sqrt(query.size(-1)))
    if attention_mask is None:
        return forward(*args, **kwargs)
    return forward(**kwargs | {"attn_mask_type": AttnMaskType.arbitrary})


def _is_plain(config: Any, attention_mask: Tensor | None) -> bool:
    in_mask = attention_mask is not None and attention_window(config) is not None
    return (config.window_size is None or in_mask) and config.softmax_type == "vanilla"


@contextlib.contextmanager
def last_positions(chunks: Sequence[Any], tokens: TokenPositions) -> Iterator[None]:
    """Return from the last layer only each row's last position, whose logits alone are read."""

    def select(block: nn.Module, args: Any, hidden: Tensor) -> Tensor:
        return hidden if hidden.size(0) == 1 else tokens.select_last(hidden)

    handles = [chunk.decoder.register_forward_hook(select) for chunk in chunks if chunk.post_process]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def rotated_key_cache(chunks: Sequence[Any], tokens: TokenPositions) -> Iterator[None]:
    """Rotate each key once, by its own position, before it is cached.

    Megatron caches keys before their rotary positions are applied, and rotates all of them again for every new token,
    by the column that they are cached in. The cost of a token grows with the columns, and all rows need their tokens
    in the same columns. For the local attention, cached keys and values are also laid out in memory in the order in
    which it reads them.
    """
    attentions: list[Any] = []
    rotations = [_Rotation(chunk, tokens) for chunk in chunks if chunk.position_embedding_type in _ROTARY]
    for rotation in rotations:
        for attention in rotation.attentions:
            attention._adjust_key_value_for_inference = functools.partial(_cache_rotated, attention, rotation)
            attentions.append(attention)
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
    is_local = isinstance(attention.core_attention, TEDotProductAttention) and not transformer_engine.is_counted(key)
    if is_local and attention.layer_number not in memory:
        memory[attention.layer_number] = tuple(
            _empty_cache(tensor, cache.max_sequence_length) for tensor in (key, value)
        )
    adjust = type(attention)._adjust_key_value_for_inference
    return adjust(attention, cache, query, key, value, None, *rest)


@contextlib.contextmanager
def latent_positions(chunks: Sequence[nn.Module], tokens: TokenPositions) -> Iterator[None]:
    """Rotate each row's new token of multi-latent attention by its own position; Megatron caches keys rotated."""
    attentions = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MLASelfAttention)]
    rotaries: list[Any] = [attention.rotary_pos_emb for attention in attentions]
    for rotary in rotaries:
        rotary.forward = functools.partial(_angles_of_rows, rotary, tokens)
    try:
        yield
    finally:
        for rotary in rotaries:
            del rotary.forward


def _angles_of_rows(rotary: Any, tokens: TokenPositions, length: int, **kwargs: Any) -> Any:
    """Return the angles ``[length, 1, 1, width]``, or if rows differ the new tokens' ``[length, rows, 1, width]``."""
    rotated = type(rotary).forward(rotary, length, **kwargs)
    if tokens.new is None:
        return rotated
    angles, scale = rotated if isinstance(rotated, tuple) else (rotated, None)
    of_rows = angles[tokens.new].transpose(0, 1).expand(length, -1, -1, -1)
    return of_rows if scale is None else (of_rows, scale)


class _Rotation:
    """Rotary positions as Megatron applies them; cosines and sines are computed once for all layers and tokens."""

    def __init__(self, chunk: Any, tokens: TokenPositions) -> None:
        self.attentions = [module for module in chunk.modules() if isinstance(module, SelfAttention)]
        self.tokens = tokens
        self.mscale: float = chunk.rotary_pos_emb(1)[1] if chunk.position_embedding_type == "yarn" else 1.0
        self.angles: Tensor | None = None
        self.cosines = self.sines = torch.empty(0)

    def rotate(self, attention: Any, heads: Sequence[Tensor], angles: Tensor, start: int) -> list[Tensor]:
        """Rotate every one of ``heads``.

        Args:
            attention: the Megatron attention module that they belong to.
            heads: queries and keys, each ``[seq, batch, heads, width]``.
            angles: ``[positions, 1, 1, width]``; a smaller width leaves the rest of every head unchanged.
            start: position of the first token, unless rows differ.
        """
        config, length = attention.config, heads[0].size(0)
        if config.rotary_interleaved or self.mscale != 1.0 or angles.size(-1) < heads[0].size(-1):
            options = {"config": config, "mscale": self.mscale, "cp_group": attention.pg_collection.cp}
            selected = self.tokens.select_angles(angles, start, length)
            return [apply_rotary_pos_emb(head, selected, **options) for head in heads]
        if self.angles is not angles:
            sines = angles.sin().to(heads[0].dtype)
            self.angles, self.cosines = angles, angles.cos().to(heads[0].dtype)
            self.sines = torch.cat((-sines[..., : sines.size(-1) // 2], sines[..., sines.size(-1) // 2 :]), -1)
        cosines = self.tokens.select_angles(self.cosines, start, length)
        sines = self.tokens.select_angles(self.sines, start, length)
        return [torch.addcmul(head * cosines, head.roll(head.size(-1) // 2, -1), sines) for head in heads]


def _empty_cache(first: Tensor, length: int) -> Tensor:
    """``[length, batch, heads, width]`` for ``first`` and what follows it, contiguous in memory for each head."""
    _, batch, heads, width = first.shape
    return first.new_empty(batch, heads, length, width).permute(2, 0, 1, 3)
