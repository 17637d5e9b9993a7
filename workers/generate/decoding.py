"""Generation with Megatron's key-value cache, over the tp and pp axes.

Prompts are padded on the left, so that all rows of a batch write their next token into the same column. Every stage
runs the same steps; the last one draws the tokens, and one broadcast a step takes them to the others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.utils import set_model_to_sequence_parallel
from torch import Tensor, nn

from workers.generate.linears import linears_for_generation
from workers.generate.rollout import Generated, Prompts
from workers.generate.sampling import Sampling, draw_tokens, uniform
from workers.model.local_attention import TEDotProductAttention

__all__ = ["generate"]


@torch.no_grad()
def generate(
    chunks: Sequence[nn.Module],
    pg: ProcessGroupCollection,
    samples: Prompts,
    sampling: Sampling,
    vocab_size: int,
) -> Generated:
    """One response to every row; off the last stage its log-probabilities are 0.

    Args:
        chunks: this rank's model chunks, without DistributedDataParallel, in eval mode.
        samples: one response to each row.
        vocab_size: ids from here up are padding of the vocabulary and are never drawn.
    """
    used = int((samples.attention_mask != 0).any(0).int().argmax())  # columns before it are padding in every row
    prompts, padding, seeds = samples.ids[:, used:], samples.attention_mask[:, used:] == 0, samples.seeds[:, 0]
    rows, width = prompts.shape
    decoder = _Decoder(chunks, pg, padding, width + sampling.response_length)
    responses = torch.full_like(prompts[:, :1], sampling.pad_token_id).repeat(1, sampling.response_length)
    log_probs = torch.zeros(responses.shape, device=prompts.device)
    mask = torch.zeros_like(responses)
    done = torch.zeros(rows, dtype=torch.bool, device=prompts.device)
    stops = torch.tensor(sampling.eos_token_ids, device=prompts.device)
    new = prompts
    with (
        _whole_sequences(chunks),
        _padding_hidden_from_engine(chunks),
        _cached_for_attention(chunks),
        linears_for_generation(chunks),
        _last_position_only(chunks),
    ):
        for step in range(sampling.response_length):
            logits = decoder.next_logits(new)
            if logits is not None:
                noise = uniform(seeds, step) if sampling.do_sample else None
                token, log_prob = draw_tokens(logits[:, :vocab_size], noise, sampling)
                log_probs[:, step] = torch.where(done, 0.0, log_prob)
            else:
                token = torch.empty(rows, dtype=torch.long, device=prompts.device)
            token = decoder.from_last_stage(token).masked_fill(done, sampling.pad_token_id)
            responses[:, step] = token
            mask[:, step] = ~done
            done = done | torch.isin(token, stops)
            if decoder.all_done(done):
                break
            new = token[:, None]
    return Generated(responses, mask, log_probs)


class _Decoder:
    """The model with its cache: token ids in, logits of the next token out on the last stage."""

    def __init__(self, chunks: Sequence[Any], pg: ProcessGroupCollection, padding: Tensor, max_length: int) -> None:
        self.chunks = chunks
        self.pg = pg
        self.stages = dist.get_process_group_ranks(pg.pp)
        self.stage = pg.pp.rank()
        self.cache = StaticInferenceContext(padding.size(0), max_length)
        self.length = 0
        self.offset = padding.sum(1, keepdim=True)
        tail = padding.new_zeros(padding.size(0), max_length - padding.size(1))
        self.padding = torch.cat((padding, tail), 1) if bool(padding.any()) else None

    def next_logits(self, ids: Tensor) -> Tensor | None:
        """Float ``[rows, vocab]`` after ``ids`` ``[rows, new]`` on the last stage, None on the others."""
        new = ids.size(1)
        columns = torch.arange(self.length, self.length + new, device=ids.device)
        positions = (columns[None] - self.offset).clamp(min=0)
        mask = self._mask(new)
        output = None
        for index, chunk in enumerate(self.chunks):
            if self.stage > 0 or index > 0:
                chunk.set_input_tensor(self._receive(chunk, new, ids.size(0)))
            output = chunk(ids, positions, mask, inference_context=self.cache, runtime_gather_output=True)
            if not self._is_end(index):
                self._send(output)
        self.length += new
        self.cache.increment_sequence_len_offset(new)
        self.cache.enable_decode_mode()
        assert output is not None
        return output[:, -1] if self._is_end(len(self.chunks) - 1) else None

    def from_last_stage(self, token: Tensor) -> Tensor:
        if self.pg.pp.size() > 1:
            dist.broadcast(token, self.stages[-1], group=self.pg.pp)
        return token

    def all_done(self, done: Tensor) -> bool:
        """Whether every row is done; with experts, on every rank that their exchange waits for."""
        if self.chunks[0].config.num_moe_experts is None or self.pg.tp_ep.size() == 1:
            return bool(done.all())
        left = (~done).sum()
        dist.all_reduce(left, group=self.pg.tp_ep)
        return int(left) == 0

    def _mask(self, new: int) -> Tensor | None:
        """True where attention is not allowed; None: causality alone. A padding token sees itself, so that its row of
        the softmax is not empty.
        """
        if self.padding is None:
            return None
        seen = self.length + new
        hidden = self.padding[:, None, None, :seen]
        if new == 1:
            return hidden
        later = torch.ones(new, seen, dtype=torch.bool, device=hidden.device).triu(self.length + 1)
        itself = torch.eye(new, seen, dtype=torch.bool, device=hidden.device)
        return (later | hidden) & ~itself

    def _is_end(self, index: int) -> bool:
        return self.stage == len(self.stages) - 1 and index == len(self.chunks) - 1

    def _receive(self, chunk: Any, new: int, rows: int) -> Tensor:
        hidden = torch.empty(
            new, rows, chunk.config.hidden_size, dtype=chunk.config.params_dtype, device=self.offset.device
        )
        dist.recv(hidden, self.stages[self.stage - 1], group=self.pg.pp)
        return hidden

    def _send(self, hidden: Tensor) -> None:
        dist.send(hidden.contiguous(), self.stages[(self.stage + 1) % len(self.stages)], group=self.pg.pp)


@contextlib.contextmanager
def _whole_sequences(chunks: Sequence[Any]) -> Iterator[None]:
    """One new token does not divide over tp: sequence parallelism is off while tokens are generated."""
    divided = [chunk for chunk in chunks if chunk.config.sequence_parallel]
    for chunk in divided:
        set_model_to_sequence_parallel(chunk, False)
    try:
        yield
    finally:
        for chunk in divided:
            set_model_to_sequence_parallel(chunk, True)


@contextlib.contextmanager
def _cached_for_attention(chunks: Sequence[Any]) -> Iterator[None]:
    """Megatron caches keys as they are and rotates all of them by their positions again for every token, so that a
    token costs more and more. Here each key is rotated once, before it is cached; and what the local attention reads
    lies in memory in the order in which it reads it.
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
        query, key = rotation.turned(attention, (query, key), rotary[0], cache.sequence_len_offset)
    held = cache.key_value_memory_dict
    if attention.layer_number not in held and isinstance(attention.core_attention, TEDotProductAttention):
        held[attention.layer_number] = tuple(_memory(tensor, cache.max_sequence_length) for tensor in (key, value))
    cached = type(attention)._adjust_key_value_for_inference
    return cached(attention, cache, query, key, value, None, *rest)


class _Rotation:
    """Rotary positions as Megatron applies them, with cosines and sines made once for all layers and tokens."""

    def __init__(self) -> None:
        self.angles: Tensor | None = None
        self.cosines = self.sines = torch.empty(0)

    def turned(self, attention: Any, heads: Sequence[Tensor], angles: Tensor, start: int) -> list[Tensor]:
        """Every one of ``heads`` ``[seq, batch, heads, width]``, its first token at position ``start``.

        Args:
            angles: ``[positions, 1, 1, width]``; a smaller width leaves the rest of every head as it is.
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


def _memory(first: Tensor, length: int) -> Tensor:
    """``[length, batch, heads, width]`` to hold ``first`` and what follows it, each head's sequence in one piece."""
    _, batch, heads, width = first.shape
    return first.new_empty(batch, heads, length, width).permute(2, 0, 1, 3)


@contextlib.contextmanager
def _last_position_only(chunks: Sequence[Any]) -> Iterator[None]:
    """After the last layer's attention nothing looks at other positions than the last: its feed-forward part is
    computed for that one. Experts keep all, since what they drop may depend on how many tokens there are.
    """
    last = [layer for chunk in chunks if chunk.post_process for layer in chunk.decoder.layers[-1:]]
    dense = [layer for layer in last if isinstance(layer.mlp, MLP)]
    for layer in dense:
        layer._forward_mlp = functools.partial(_of_last_position, layer)
    try:
        yield
    finally:
        for layer in dense:
            del layer._forward_mlp


def _of_last_position(layer: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    return type(layer)._forward_mlp(layer, hidden[-1:], *args, **kwargs)


@contextlib.contextmanager
def _padding_hidden_from_engine(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Transformer Engine heeds a mask only where the mask's type says so; Megatron's says causal, then none."""

    def as_given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
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
    handles = [core.register_forward_pre_hook(as_given, with_kwargs=True) for core in cores]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
