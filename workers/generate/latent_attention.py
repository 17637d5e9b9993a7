"""Multi-latent attention while tokens are generated: the cache has the compressed keys and values of each position.

A position takes ``kv_lora_rank + qk_pos_emb_head_dim`` channels on every tp rank, for all heads together. The prompt is
attended to as in training. For a later token, the projection that would decompress all cached keys is applied to its
query instead, and the one of the values to the result.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from torch import Tensor, nn

from workers.generate.decoding_patches import TokenPositions
from workers.lora.adapters import adapters_of, input_of_product
from workers.model.attend_once import attend_once


@contextlib.contextmanager
def latent_attention(chunks: Sequence[nn.Module], tokens: TokenPositions) -> Iterator[None]:
    """Cache what Megatron decompresses for every head, and rotate each row's new token by its own position.

    The weights must not change inside. Megatron caches compressed keys and values only with kernels for CUDA. An
    attention with its own forward pass, in a subclass or on the instance, keeps it, and Megatron's cache of all heads.
    """
    patched: list[Any] = []
    for chunk in chunks:
        for name, attention in chunk.named_modules():
            if not isinstance(attention, MLASelfAttention):
                continue
            rotary = attention.rotary_pos_emb
            rotary.forward = functools.partial(_angles_of_rows, rotary, tokens)
            patched.append(rotary)
            if getattr(attention.forward, "__func__", None) is MultiLatentAttention.forward:
                attention.forward = functools.partial(_attend, attention, _decompression(chunk, name, attention))
                patched.append(attention)
    try:
        yield
    finally:
        for module in patched:
            del module.forward


def _decompression(chunk: nn.Module, name: str, attention: Any) -> Tensor:
    """Return the weight that makes keys and values of compressed ones, ``[heads, key + value width, kv_lora_rank]``."""
    weight: Tensor = attention.linear_kv_up_proj.weight
    for adapters in adapters_of([chunk]):
        merge = adapters.merging(f"{name}.linear_kv_up_proj.weight")
        weight = weight if merge is None else merge(weight)
    return weight.view(attention.num_attention_heads_per_partition, -1, weight.size(1))


def _attend(
    attention: Any,
    weight: Tensor,
    hidden: Tensor,
    attention_mask: Tensor | None,
    *,
    inference_context: StaticInferenceContext,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of the prompts ``[seq, rows, hidden]``, or of one later token of each row, as Megatron's forward."""
    config, start = attention.config, inference_context.sequence_len_offset
    query, key, value, _, compressed = attention.get_query_key_value_tensors(
        hidden, inference_context=inference_context
    )
    compressed = input_of_product(attention.linear_kv_up_proj, compressed)
    new = torch.cat([compressed, key[:, :, 0, config.qk_head_dim :]], -1)
    memory = inference_context.key_value_memory_dict
    if attention.layer_number not in memory:
        memory[attention.layer_number] = (new.new_empty(inference_context.max_sequence_length, *new.shape[1:]),)
    (cached,) = memory[attention.layer_number]
    cached[start : start + len(new)] = new
    if start == 0:
        output = attention.core_attention(query, key, value, attention_mask, attn_mask_type=attention.attn_mask_type)
        return attention.linear_proj(output)
    of_keys, of_values = weight.split([config.qk_head_dim, config.v_head_dim], 1)
    content, position = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
    query = torch.cat([torch.einsum("sbhd,hdr->sbhr", content, of_keys), position], -1)
    cached = cached[: start + 1, :, None]
    allowed = None if attention_mask is None else ~attention_mask
    output = attend_once(query, cached, cached[..., : config.kv_lora_rank], allowed, attention.softmax_scale)
    output = torch.einsum("sbhr,hvr->sbhv", output.unflatten(-1, (-1, config.kv_lora_rank)), of_values)
    return attention.linear_proj(output.flatten(2))


def _angles_of_rows(rotary: Any, tokens: TokenPositions, length: int, **kwargs: Any) -> Any:
    """Return the angles ``[length, 1, 1, width]``, or if rows differ the new tokens' ``[length, rows, 1, width]``."""
    rotated = type(rotary).forward(rotary, length, **kwargs)
    if tokens.new is None:
        return rotated
    angles, scale = rotated if isinstance(rotated, tuple) else (rotated, None)
    of_rows = angles[tokens.new].transpose(0, 1).expand(length, -1, -1, -1)
    return of_rows if scale is None else (of_rows, scale)
