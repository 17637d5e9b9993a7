"""The decoding loop: one token per step with Megatron's key-value cache, over the tp and pp axes.

Prompts go through the model aligned to column 0, so that a causal mask alone hides the padding after shorter ones. All
rows then write their next token into the same column of the cache, after the longest prompt, with the rotation of its
own position. Only the padding between a shorter prompt and its response has to be masked, and what is before a sliding
window, whose width is in positions and not in columns: one bool per row and column.
No mask has a row for every query, which would turn off flash attention and take memory for every head. A model with
recurrent states has no cache: every token is computed from the whole sequence.

Every stage runs the same steps. One rank of the last stage draws the tokens, and one broadcast per step sends them to
all tp and pp ranks. Tensor-parallel ranks that draw on their own could disagree: sums on a GPU differ in the last bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from workers.generate.decoding_patches import (
    TokenPositions,
    check_attention,
    check_positions,
    last_positions,
    latent_positions,
    masked_decoding,
    rotated_key_cache,
    unfused_rotation,
    without_sequence_parallelism,
)
from workers.generate.rollout_protocol import Generated, Prompts
from workers.generate.sampling import Sampling, draw_tokens, position_keys
from workers.model.local_attention import attention_window
from workers.router_replay.routers import ModelRouters
from workers.router_replay.rows import RecordedExperts, experts_of_responses


@torch.no_grad()
def generate(
    chunks: Sequence[nn.Module],
    pg: ProcessGroupCollection,
    samples: Prompts,
    sampling: Sampling,
    vocab_size: int,
    device: torch.device,
    routers: ModelRouters | None = None,
) -> Generated:
    """Generate one response for every row.

    Args:
        chunks: this rank's model chunks, without DistributedDataParallel, in eval mode.
        pg: the process groups of the layout.
        samples: prompts on the CPU, padded on the left, with one seed per row.
        sampling: how tokens are drawn, and when a response ends.
        vocab_size: ids from this one on are padding of the vocabulary and are never drawn.
        device: of the model.
        routers: the routers of the chunks, whose choices are returned. None: no choices are returned.

    Returns:
        The responses, on every rank; the log-probabilities are 0 on all stages but the last.
    """
    prompts, lengths = _left_aligned(samples)
    rows, width = prompts.shape
    longest = sampling.response_length
    experts = None if routers is None else RecordedExperts(routers, rows, width + longest).to(device)
    has_states = getattr(get_model_config(chunks[0]), "is_hybrid_model", False)
    decoder = (_Recomputing if has_states else _Decoder)(chunks, pg, lengths, width + longest, device, experts)
    prompts, seeds = prompts.to(device), samples.seeds[:, 0].to(device)
    responses = torch.full_like(prompts[:, :1], sampling.pad_token_id).repeat(1, longest)
    log_probs = torch.zeros(responses.shape, device=prompts.device)
    mask = torch.zeros_like(responses)
    done = torch.zeros(rows, dtype=torch.bool, device=prompts.device)
    stops = torch.tensor(sampling.eos_token_ids, device=prompts.device)
    new = prompts
    present = _seen(prompts, lengths.to(prompts.device), vocab_size) if sampling.repetition_penalty != 1.0 else None
    with without_sequence_parallelism(chunks), last_positions(chunks, decoder.tokens), decoder.patched():
        for step in _steps(longest, device):
            logits = decoder.next_logits(new, step)
            if logits is not None:
                keys = position_keys(seeds, step) if sampling.do_sample else None
                token, log_prob = draw_tokens(logits[:, :vocab_size], keys, sampling, present)
                log_probs[:, step] = torch.where(done, 0.0, log_prob)
            else:
                token = torch.empty(rows, dtype=torch.long, device=prompts.device)
            token = decoder.of_one_rank(token).masked_fill(done, sampling.pad_token_id)
            responses[:, step] = token
            if present is not None:
                present.scatter_(1, token[:, None], True)
            mask[:, step] = ~done
            done = done | torch.isin(token, stops)
            if decoder.all_done(done):
                break
            new = token[:, None]
    column = None
    if experts is not None:
        column = experts_of_responses(experts, lengths.to(device), mask, samples.ids.size(1))
    return Generated(responses, mask, log_probs, routed_experts=column)


class _Decoder:
    """The model with its cache: takes token ids, and returns the logits of the next token on the last stage."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        pg: ProcessGroupCollection,
        lengths: Tensor,
        max_length: int,
        device: torch.device,
        experts: RecordedExperts | None,
    ) -> None:
        self.chunks: Sequence[Any] = chunks
        self.experts = experts
        self.pg = pg
        self.stages = dist.get_process_group_ranks(pg.pp)
        self.stage = pg.pp.rank()
        # Global ranks grow by the same step along each axis, so this is tp rank 0 of the last stage.
        self.drawing = self.stages[-1] + dist.get_process_group_ranks(pg.tp)[0] - dist.get_rank()
        self.cache = StaticInferenceContext(len(lengths), max_length)
        self.tokens = TokenPositions()
        self.device = device
        self.width, self.of_rows = int(lengths.max()), lengths
        check_attention(get_model_config(chunks[0]))
        self.window = attention_window(get_model_config(chunks[0]))
        equal = bool((lengths == self.width).all())
        self.lengths = None if equal and self.window is None else lengths.to(device)
        columns = torch.arange(max_length, device=device)
        if not equal:
            check_positions(chunks)
        if self.lengths is not None:
            of_row, is_prompt = self.lengths[:, None], columns < self.width
            self.positions = torch.where(is_prompt, columns, columns - self.width + of_row)
            padding = (columns >= of_row) & is_prompt
            self.hidden = padding[:, None, None, :]  # as the model takes it: True for keys that are not attended to

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Context manager of passes, in which attention is computed with the cache."""
        with (
            masked_decoding(self.chunks),
            unfused_rotation(self.chunks),
            rotated_key_cache(self.chunks, self.tokens),
            latent_positions(self.chunks, self.tokens),
        ):
            yield

    def next_logits(self, ids: Tensor, step: int) -> Tensor | None:
        """Float ``[rows, vocab]`` after ``ids`` ``[rows, new]`` on the last stage, None on the others.

        Step 0 takes the prompts, every later one a token for each row.
        """
        new, start = ids.size(1), self.width + step - 1 if step else 0
        self.cache.sequence_len_offset = start
        positions = torch.arange(start, start + new, device=ids.device).expand_as(ids)
        mask = None
        if self.lengths is not None and start == 0:
            self.tokens.last = self.lengths - 1
        elif self.lengths is not None:
            self.tokens.last, self.tokens.new = None, self.lengths + (start - self.width)
            positions, mask = self.tokens.new[:, None], self.hidden[..., : start + 1]
            if self.window is not None:
                before = (positions - self.positions[:, : start + 1])[:, None, None, :]
                mask = mask | (before > self.window)
        output = self._through_chunks(ids, positions, mask, inference_context=self.cache)
        self.cache.enable_decode_mode()
        return output

    def _through_chunks(self, ids: Tensor, positions: Tensor, mask: Tensor | None, **context: Any) -> Tensor | None:
        output = None
        for index, chunk in enumerate(self.chunks):
            if self.stage > 0 or index > 0:
                output = None  # of the chunk before, which was sent
                chunk.set_input_tensor(self._receive(chunk, ids.size(1), ids.size(0)))
            with self._recording(chunk, positions):
                output = chunk(ids, positions, mask, runtime_gather_output=True, **context)
            if not self._is_end(index):
                self._send(output)
        assert output is not None
        return output[:, -1] if self._is_end(len(self.chunks) - 1) else None

    def of_one_rank(self, token: Tensor) -> Tensor:
        """Return the tokens that tp rank 0 of the last stage drew, on every tp and pp rank."""
        if self.pg.mp.size() > 1:
            dist.broadcast(token, self.drawing, group=self.pg.mp)
        return token

    def all_done(self, done: Tensor) -> bool:
        """Whether every row is done; with experts, on all ranks that exchange tokens with this one."""
        left = (~done).sum()
        if self.chunks[0].config.num_moe_experts is not None and self.pg.tp_ep.size() > 1:
            dist.all_reduce(left, group=self.pg.tp_ep)
        return int(left) == 0

    def _recording(self, chunk: Any, positions: Tensor) -> contextlib.AbstractContextManager[None]:
        if self.experts is None:
            return contextlib.nullcontext()
        first = torch.arange(len(positions), device=positions.device)[:, None] * self.experts.width
        return self.experts.in_pass(chunk, (first + positions).T.flatten())

    def _is_end(self, index: int) -> bool:
        return self.stage == len(self.stages) - 1 and index == len(self.chunks) - 1

    def _receive(self, chunk: Any, new: int, rows: int) -> Tensor:
        hidden = torch.empty(new, rows, chunk.config.hidden_size, dtype=chunk.config.params_dtype, device=self.device)
        dist.recv(hidden, self.stages[self.stage - 1], group=self.pg.pp)
        return hidden

    def _send(self, hidden: Tensor) -> None:
        dist.send(hidden.contiguous(), self.stages[(self.stage + 1) % len(self.stages)], group=self.pg.pp)


class _Recomputing(_Decoder):
    """The same for a model with recurrent states, which no cache keeps: each pass is over the whole sequences."""

    ids: Tensor | None = None

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Context manager of passes, which are those for scores."""
        yield

    def next_logits(self, ids: Tensor, step: int) -> Tensor | None:
        """See ``_Decoder``; a row's token follows its last one, so that only padding is after it."""
        if self.ids is None:
            self.ids, self.ends = ids, self.of_rows.to(ids.device)
        else:
            self.ids = torch.nn.functional.pad(self.ids, (0, self.width + step - self.ids.size(1))).scatter(
                1, self.ends[:, None], ids
            )
            self.ends = self.ends + 1
        self.tokens.last = self.ends - 1
        columns = torch.arange(self.ids.size(1), device=ids.device).expand_as(self.ids)
        return self._through_chunks(self.ids, columns, None)


def _steps(longest: int, device: torch.device) -> Iterable[int]:
    """The steps that compute; without data the first and the last one, whose memory is that of all."""
    return sorted({0, longest - 1}) if device.type == "meta" else range(longest)


def _seen(prompts: Tensor, lengths: Tensor, vocab_size: int) -> Tensor:
    """The tokens of the prompts, bool ``[rows, vocab]``, without their padding."""
    inside = torch.arange(prompts.size(1), device=prompts.device) < lengths[:, None]
    counts = torch.zeros(len(prompts), vocab_size, dtype=torch.long, device=prompts.device)
    return counts.scatter_add_(1, prompts, inside.long()) > 0


def _left_aligned(samples: Prompts) -> tuple[Tensor, Tensor]:
    """The prompts from column 0 on, as wide as the longest ``[rows, prompt]``, and their lengths ``[rows]``."""
    lengths = (samples.attention_mask != 0).sum(1)
    columns = torch.arange(int(lengths.max()))
    index = (columns + samples.ids.size(1) - lengths[:, None]).clamp(max=samples.ids.size(1) - 1)
    return torch.where(columns < lengths[:, None], samples.ids.gather(1, index), 0), lengths
