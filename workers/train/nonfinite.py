"""Report gradients that are not finite: on which rank, in which loss, in which parameter.

To find the parameter, each rank computes the mini-batch again, without reduction. Without reduction over data-parallel
ranks, a gradient that is not finite stays on the ranks that compute with it. Within a rank and along tp, cp, ep and pp
it still spreads to all layers before its own. So the origin is the module that the forward pass comes to last, of all
ranks' modules with such a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

from mcontroller.errors import ConfigError, MControllerError
from parallel_state.agreement import all_gather_values
from parallel_state.axes import DENSE_AXES
from parallel_state.hangs.report import rank_text
from parallel_state.layout import ParallelLayout
from workers.train.batches import TokenBatch
from workers.train.metrics import LOSS_COUNT, LOSS_SIZE


class NonFiniteGradient(MControllerError, ArithmeticError):
    """A NaN or Inf reached the gradients; the weights are as they were before the step.

    Attributes:
        method: the worker method that trained.
        step: number of steps that the optimizer had made.
        grad_norm: norm of the gradients.
        ranks: ranks whose own loss or metrics are not finite.
        parameters: by rank, the first parameter in the backward pass whose gradient is not finite, without reduction
            over data-parallel ranks.
        origin: the rank whose parameter is the first of all; None if only the sum over ranks is not finite.
    """

    method: str
    step: int
    grad_norm: float
    ranks: list[int]
    parameters: dict[int, str]
    origin: int | None


class GradientFinding(NamedTuple):
    """The first parameter of a rank whose gradient is not finite; findings of several ranks are ordered by time.

    Attributes:
        part: number of the part of the mini-batch that was computed.
        chunks_after: number of model chunks whose backward pass runs before.
        before: number of modules that the forward pass of the chunk comes to before the parameter's, negative.
        finite: number of the module's parameters with a finite gradient. On a rank of tp that only got its input's
            gradient from the others, the norm inside a linear layer has none, and the layer's weight has one.
        parameter: its name.
    """

    part: int
    chunks_after: int
    before: int
    finite: int
    parameter: str


def all_finite(reports: Sequence[Mapping[str, Tensor]], device: torch.device) -> bool:
    """Return whether the reports of all ranks' losses are free of NaN and Inf (a collective over all ranks)."""
    wrong = torch.tensor(sum(not _is_finite(value) for report in reports for value in report.values()), device=device)
    dist.all_reduce(wrong)
    return int(wrong) == 0


def check_counts(method: str, reports: Sequence[Mapping[str, Tensor]]) -> None:
    """Check what the loss is divided by (a collective): a negative count would reverse the training, 0 scale it.

    Args:
        method: the worker method that trained.
        reports: the reports of this rank's losses for the mini-batch.

    Raises:
        ConfigError: on every rank, if a rank's loss returned a negative count, or all of them 0 and the loss is not 0.
    """
    counts = [float(report[LOSS_COUNT]) for report in reports]
    mine = min(counts, default=0.0), sum(counts), sum(float(report[LOSS_SIZE]) for report in reports)
    ranks = all_gather_values(mine)
    negative = [(least, rank) for rank, (least, _, _) in enumerate(ranks) if least < 0]
    size = sum(size for _, _, size in ranks)
    if negative:
        count, rank = negative[0]
        wrong = f"the loss of a micro-batch on rank {rank} returned the count {count:g}"
    elif size > 0 and not any(count for _, count, _ in ranks):
        count, wrong = 0.0, f"the loss of a mini-batch is {size:g}, and the counts that it returned are 0"
    else:
        return
    raise ConfigError(
        f"{method}: {wrong}: the sum of the loss over the mini-batch is divided by the sum of the counts, which must "
        "be above 0. The weights are unchanged",
        key="loss",
        value=count,
    )


def raise_nonfinite(
    method: str,
    step: int,
    grad_norm: float,
    reports: Sequence[Mapping[str, Tensor]],
    gradient: GradientFinding | None,
    layout: ParallelLayout,
) -> None:
    """Raise NonFiniteGradient on every rank, with the findings of all of them (a collective over all ranks).

    Args:
        method: the worker method that trained.
        step: number of steps that the optimizer has made.
        grad_norm: norm of the gradients.
        reports: the reports of this rank's losses for the mini-batch.
        gradient: this rank's ``first_nonfinite_gradient``.
        layout: of the ranks, for the message.
    """
    wrong = {name for report in reports for name, value in report.items() if not _is_finite(value)}
    names = sorted(wrong - {LOSS_SIZE} or wrong)  # the loss alone if its report is finite
    findings = list(enumerate(all_gather_values((names, gradient))))
    ranks = [rank for rank, (wrong, _) in findings if wrong]
    gradients = {rank: finding for rank, (_, finding) in findings if finding is not None}
    origin = min(gradients, key=lambda rank: (gradients[rank], rank), default=None)
    origins = [f"{', '.join(wrong)} on {_rank_text(layout, rank)}" for rank, (wrong, _) in findings if wrong][:1]
    if origin is not None:
        origins.append(f"the gradient of {gradients[origin].parameter} on {_rank_text(layout, origin)}")
    elif not origins:
        origins.append("only the sum of the gradients, which are finite on every rank")
    raise NonFiniteGradient(
        f"{method}, optimizer step {step}: not finite: {'; '.join(origins)}; gradient norm {grad_norm}. The weights "
        "are unchanged. Check the batch, lower the learning rate, or set optim.on_nonfinite=skip",
        method=method,
        step=step,
        grad_norm=grad_norm,
        ranks=ranks,
        parameters={rank: finding.parameter for rank, finding in gradients.items()},
        origin=origin,
    )


def _rank_text(layout: ParallelLayout, rank: int) -> str:
    return rank_text(rank, {axis: layout.coordinates(rank)[axis] for axis in DENSE_AXES})


def first_nonfinite_gradient(
    chunks: Sequence[Any],
    micro_batches: Sequence[TokenBatch],
    compute: Callable[[Sequence[TokenBatch]], object],
    pg: ProcessGroupCollection,
) -> GradientFinding | None:
    """Compute a mini-batch again without reduction, and return this rank's first gradient that is not finite.

    The gradients of the chunks are overwritten.

    Args:
        chunks: this rank's model chunks, inside DistributedDataParallel.
        micro_batches: the micro-batches of the mini-batch, on the device.
        compute: adds the gradients of some of them to the chunks' gradients.
        pg: the groups of the layout.
    """
    size = pg.pp.size() if len(chunks) > 1 else 1  # an interleaved schedule needs a multiple of the stages
    first: GradientFinding | None = None
    with _kept_buffers(chunks):
        for part, start in enumerate(range(0, len(micro_batches), size)):  # all of them: other ranks may find more
            for chunk in chunks:
                chunk.zero_grad_buffer()
            with _noting_order(chunks) as order, _without_reduction(chunks):
                compute(micro_batches[start : start + size])
            for index, chunk in enumerate(chunks):
                finding = _first_of(chunk, part, _chunks_after(index, len(chunks), pg), order)
                first = min((place for place in (first, finding) if place is not None), default=None)
    return first


def _is_finite(tensor: Tensor) -> bool:
    """Return whether no value is NaN or Inf."""
    return bool(torch.isfinite(tensor).all())


def _chunks_after(index: int, chunks: int, pg: ProcessGroupCollection) -> int:
    return chunks * pg.pp.size() - 1 - (index * pg.pp.size() + pg.pp.rank())


@contextlib.contextmanager
def _noting_order(chunks: Sequence[nn.Module]) -> Iterator[dict[nn.Module, int]]:
    """Context manager whose value gets the modules in the order in which their first forward passes start."""
    order: dict[nn.Module, int] = {}

    def note(module: nn.Module, inputs: Any) -> None:
        order.setdefault(module, len(order))

    hooks = [module.register_forward_pre_hook(note) for chunk in chunks for module in chunk.modules()]
    try:
        yield order
    finally:
        for hook in hooks:
            hook.remove()


def _first_of(chunk: nn.Module, part: int, chunks_after: int, order: Mapping[nn.Module, int]) -> GradientFinding | None:
    """Return the parameter of the last module in the forward pass that has a gradient which is not finite."""
    findings = []
    for prefix, module in unwrap_model(chunk).named_modules():
        gradients = {
            name: gradient
            for name, parameter in module.named_parameters(recurse=False)
            if (gradient := getattr(parameter, "main_grad", None)) is not None
        }
        wrong = [name for name, gradient in gradients.items() if not _is_finite(gradient)]
        place = part, chunks_after, -order.get(module, 0), len(gradients) - len(wrong)
        findings += [GradientFinding(*place, f"{prefix}.{name}") for name in wrong]
    return min(findings, default=None)


@contextlib.contextmanager
def _kept_buffers(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager that restores the buffers of the chunks, such as the tokens that a router has counted."""
    before = [(buffer, buffer.clone()) for chunk in chunks for buffer in unwrap_model(chunk).buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


@contextlib.contextmanager
def _without_reduction(chunks: Sequence[Any]) -> Iterator[None]:
    """Context manager in which a schedule leaves gradients as each rank computed them."""
    config, names = get_model_config(chunks[0]), ("no_sync_func", "grad_sync_func", "finalize_model_grads_func")
    before = {name: getattr(config, name) for name in names}
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(chunk.no_sync())
        for name in names:
            setattr(config, name, None)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(config, name, value)
