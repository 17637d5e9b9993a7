"""Micro-batches through Megatron's schedules (no pipelining, 1F1B, interleaved), for scores and for gradients."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from workers.train.batches import TokenBatch

__all__ = ["Forward", "Loss", "run_for_gradients", "run_for_scores", "scoring"]

Forward = Callable[[nn.Module, TokenBatch], Any]
"""A model chunk and a micro-batch to the chunk's output: hidden states, or on the last stage whatever comes next."""
Loss = Callable[[TokenBatch, Any], tuple[Tensor, Tensor, dict[str, Any]]]
"""A micro-batch and the last stage's output to (sum of the loss over valid tokens, their number, what to report)."""


@contextlib.contextmanager
def scoring(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """While the block runs, dropout is off and nothing is kept for gradients."""
    training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk, mode in zip(chunks, training, strict=True):
            chunk.train(mode)


def run_for_scores(chunks: Sequence[nn.Module], micro_batches: Sequence[TokenBatch], forward: Forward) -> list[Any]:
    """What ``forward`` gives on the last stage for every micro-batch, in order; an empty list on other stages.

    Dropout is off while it runs.
    """

    def step(batches: Iterator[TokenBatch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        return forward(model, next(batches)), lambda output, non_loss_data: output

    with scoring(chunks):
        return _schedule(chunks, micro_batches, step, forward_only=True)


def run_for_gradients(
    chunks: Sequence[nn.Module], micro_batches: Sequence[TokenBatch], forward: Forward, loss: Loss
) -> list[dict[str, Any]]:
    """Gradients of one mini-batch, and what ``loss`` reported of every micro-batch (an empty list off the last stage).

    Gradients are added to whatever the model holds, summed over data-parallel ranks, and divided by the number of
    valid tokens on all of them.
    """

    def step(batches: Iterator[TokenBatch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        rows = next(batches)
        return forward(model, rows), functools.partial(_with_integer_count, loss, rows)

    for chunk in chunks:
        if not chunk.training:
            chunk.train()
    return _schedule(chunks, micro_batches, step, forward_only=False)


def _with_integer_count(loss: Loss, rows: TokenBatch, output: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    total, count, report = loss(rows, output)
    # An Inf can leave finite gradients: as NaN it reaches every rank that looks at them before the step.
    total = total * torch.where(torch.isfinite(total.detach()), 1.0, math.nan)
    return total, count.to(torch.int), report


def _schedule(
    chunks: Sequence[nn.Module], micro_batches: Sequence[TokenBatch], step: Callable[..., Any], *, forward_only: bool
) -> list[Any]:
    interleaved = len(chunks) > 1
    # Where shapes differ, stages tell each other the shape of every tensor before they send it.
    # Packed ones differ most of the time: padding them alike would cost what packing saves.
    varying = len({batch.input_shape for batch in micro_batches}) > 1
    get_model_config(chunks[0]).variable_seq_lengths = varying
    iterators = [iter(micro_batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if interleaved else iterators[0],
        model=list(chunks) if interleaved else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].input_shape[1],
        micro_batch_size=micro_batches[0].input_shape[0],
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
