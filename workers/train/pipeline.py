"""Run micro-batches of rows through a model, for scores or for gradients."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

from mcontroller.errors import ConfigError
from mcontroller.trace.schedule import tracing
from workers.schedule import releasing_inputs, run_schedule, scoring
from workers.train.batches import TokenBatch
from workers.train.forward import owned_targets, token_positions
from workers.train.losses import checked_loss
from workers.train.metrics import LOSS_COUNT, LOSS_SIZE

Forward = Callable[[nn.Module, TokenBatch], Any]
"""Maps a model chunk and a micro-batch to hidden states, or on the last stage to the argument of ``Loss``."""
Loss = Callable[[TokenBatch, Any], tuple[Tensor, Tensor, dict[str, Any]]]
"""Maps a micro-batch and the last stage's output to (loss summed over valid tokens, their number, the report)."""
Count = Callable[[TokenBatch], Tensor]
"""Maps a micro-batch to the number that its ``Loss`` will return, for the targets of all context-parallel ranks."""


def run_for_scores(
    chunks: Sequence[nn.Module], micro_batches: Sequence[TokenBatch], forward: Forward, pg: ProcessGroupCollection
) -> list[Any]:
    """Return the results of ``forward`` on the last stage, in the order of micro-batches; an empty list elsewhere.

    Dropout and gradients are off.

    Args:
        chunks: this rank's model chunks.
        micro_batches: on the device; as many on every data-parallel rank.
        forward: called once for each chunk and micro-batch.
        pg: the groups of the layout.

    Raises:
        ConfigError: the output of ``forward`` is no tensor, or on the last stage not ``[..., rows, targets]``.
    """
    step = _forward_step(chunks, forward, pg, lambda rows: lambda output, non_loss_data: output)
    with scoring(chunks), releasing_inputs(chunks), _tracing(chunks, micro_batches):
        return run_schedule(chunks, step, micro_batches, _shapes(micro_batches), pg, forward_only=True)


def run_for_gradients(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[TokenBatch],
    forward: Forward,
    loss: Loss,
    pg: ProcessGroupCollection,
) -> list[dict[str, Any]]:
    """Compute the gradients of one mini-batch, and return the reports of ``loss`` (an empty list off the last stage).

    Gradients are added to the chunks' gradients, and summed over data-parallel ranks. The caller divides them by the
    sum of the counts that ``loss`` returned, which the reports have under ``LOSS_COUNT``, beside ``LOSS_SIZE``.

    Args:
        chunks: this rank's model chunks, inside DistributedDataParallel.
        micro_batches: on the device; as many on every data-parallel rank.
        forward: called once for each chunk and micro-batch.
        loss: called on the last stage with each micro-batch and the result of ``forward``.
        pg: the groups of the layout.

    Raises:
        ConfigError: the output of ``forward`` or the loss has no gradients, or the loss is of another shape or type.
    """
    step = _forward_step(chunks, forward, pg, lambda rows: functools.partial(_loss_for_megatron, loss, pg, rows))
    for chunk in chunks:
        if not chunk.training:
            chunk.train()
    with releasing_inputs(chunks), _ending_replay(micro_batches), _tracing(chunks, micro_batches):
        return run_schedule(chunks, step, micro_batches, _shapes(micro_batches), pg, forward_only=False)


def _forward_step(
    chunks: Sequence[nn.Module],
    forward: Forward,
    pg: ProcessGroupCollection,
    then: Callable[[TokenBatch], Callable[..., Any]],
) -> Callable[[Iterator[TokenBatch], nn.Module], tuple[Any, Callable[..., Any]]]:
    """Return Megatron's ``forward_step_func``; ``then`` returns what Megatron calls with the last stage's output."""

    def step(batches: Iterator[TokenBatch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        rows = next(batches)
        with _choosing_experts(model, rows, pg):
            output = forward(model, rows)
        _check_output(model, rows, output, last=model is chunks[-1] and pg.pp.rank() == pg.pp.size() - 1)
        return output, then(rows)

    return step


def _shapes(micro_batches: Sequence[TokenBatch]) -> list[tuple[int, int]]:
    return [batch.input_shape for batch in micro_batches]


def _choosing_experts(
    model: nn.Module, rows: TokenBatch, pg: ProcessGroupCollection
) -> contextlib.AbstractContextManager[None]:
    """The context manager of one pass, in which experts are recorded or replayed if ``rows`` has ``experts``."""
    if rows.experts is None:
        return contextlib.nullcontext()
    return rows.experts.in_pass(unwrap_model(model), token_positions(model, rows, pg))


@contextlib.contextmanager
def _ending_replay(micro_batches: Sequence[TokenBatch]) -> Iterator[None]:
    """Context manager of forward and backward passes, after which no layer is computed again."""
    try:
        yield
    finally:
        for rows in micro_batches:
            if rows.experts is not None:
                rows.experts.routers.forget()


def _check_output(model: nn.Module, rows: TokenBatch, output: Any, *, last: bool) -> None:
    """Check what ``forward_step`` returned: hidden states, or on the last stage scores, or what the loss takes.

    In training it has gradients: Megatron skips the backward pass of an output without.
    """
    name, trains = "the output of forward_step", torch.is_grad_enabled()
    if not isinstance(output, Tensor):
        if not (last and trains):
            expected = "the scores of every target" if last else "hidden states, which the next stage would wait for"
            raise ConfigError(f"{name} is {type(output).__name__}; expected a tensor, {expected}", key="forward_step")
    elif last and not trains and output.shape[-2:] != rows.mask.shape:
        text = f"{name} is {list(output.shape)}; expected [..., rows, targets] that ends in {list(rows.mask.shape)}"
        raise ConfigError(text, key="forward_step")
    elif trains and not output.requires_grad and any(value.requires_grad for value in model.parameters()):
        raise ConfigError(
            f"{name} has no gradients, and parameters of its chunk are trained: do not detach the output of the model, "
            "nor run it under torch.no_grad()",
            key="forward_step",
        )


def _loss_for_megatron(
    loss: Loss, pg: ProcessGroupCollection, rows: TokenBatch, output: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss for Megatron, whose own count is of integers and is not used.

    The mask of the micro-batch has the targets of this rank only; ``whole_mask`` has all of them.
    """
    local = replace(rows, mask=rows.mask * owned_targets(rows, pg), whole_mask=rows.mask)
    name = getattr(loss, "__qualname__", "the loss")
    total, count, report = checked_loss(name, loss(local, output), local, output)
    report = report | {LOSS_COUNT: count, LOSS_SIZE: total.detach().abs()}
    # An infinite loss can have finite gradients. A loss of NaN makes them NaN, which the check before the step finds.
    total = total * torch.where(torch.isfinite(total.detach()), 1.0, math.nan)
    return total, torch.zeros((), dtype=torch.int, device=total.device), report


def _tracing(
    chunks: Sequence[nn.Module], micro_batches: Sequence[TokenBatch]
) -> contextlib.AbstractContextManager[None]:
    return tracing([get_model_config(chunk) for chunk in chunks], micro_batches[0].tokens.device)
