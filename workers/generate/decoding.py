"""The decoding loop: one token per step with Megatron's key-value cache, over the tp and pp axes.

Prompts are padded on the left, so that all rows of a batch write their next token into the same column. Every stage
runs the same steps. The last stage draws the tokens, and one broadcast per step sends them to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from workers.generate.decoding_patches import (
    last_position_only,
    padding_masked_in_transformer_engine,
    rotated_key_cache,
    without_sequence_parallelism,
)
from workers.generate.inference_linears import inference_linears
from workers.generate.rollout_protocol import Generated, Prompts
from workers.generate.sampling import Sampling, draw_tokens, uniform

__all__ = ["generate"]


@torch.no_grad()
def generate(
    chunks: Sequence[nn.Module],
    pg: ProcessGroupCollection,
    samples: Prompts,
    sampling: Sampling,
    vocab_size: int,
) -> Generated:
    """Generate one response for every row.

    Args:
        chunks: this rank's model chunks, without DistributedDataParallel, in eval mode.
        pg: the process groups of the layout.
        samples: prompts on the device, with one seed per row.
        sampling: how tokens are drawn, and when a response ends.
        vocab_size: ids from here on are padding of the vocabulary and are never drawn.

    Returns:
        The responses, on every rank; the log-probabilities are 0 on all stages but the last.
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
        without_sequence_parallelism(chunks),
        padding_masked_in_transformer_engine(chunks),
        rotated_key_cache(chunks),
        inference_linears(chunks),
        last_position_only(chunks),
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
    """The model with its cache: takes token ids, and returns the logits of the next token on the last stage."""

    def __init__(
        self, chunks: Sequence[nn.Module], pg: ProcessGroupCollection, padding: Tensor, max_length: int
    ) -> None:
        self.chunks: Sequence[Any] = chunks
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
        """Whether every row is done; with experts, on all ranks that exchange tokens with this one."""
        if self.chunks[0].config.num_moe_experts is None or self.pg.tp_ep.size() == 1:
            return bool(done.all())
        left = (~done).sum()
        dist.all_reduce(left, group=self.pg.tp_ep)
        return int(left) == 0

    def _mask(self, new: int) -> Tensor | None:
        """True where attention is not allowed; None if the causal mask is enough.

        A padding token attends to itself, so that its row of the softmax is not empty.
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
