"""Report gradients that are not finite: on which rank, in which loss, in which parameter.

To find the parameter, each rank computes the mini-batch again, without reduction. Without reduction over data-parallel
ranks, a gradient that is not finite stays on the ranks that compute with it.
Within a rank and along tp, cp, ep and pp it still spreads to all layers before its own. So every rank notes at which
point of its backward pass each layer got the gradient of its output, and the earliest point of all ranks is the origin.
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

from mcontroller.errors import MControllerError
from parallel_state.agreement import all_gather_values
from parallel_state.axes import DENSE_AXES
from parallel_state.hangs.report import rank_text
from parallel_state.layout import ParallelLayout
from workers.train.batches import TokenBatch


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
        point: number of gradients of outputs that this chunk had computed before the gradient of the module with the
            parameter.
        inside: whether the gradient of the module's output was finite. A module that got another one comes first: the
            module may have communicated with it.
        finite: number of the module's parameters with a finite gradient.
        parameter: its name.
    """

    part: int
    chunks_after: int
    point: int
    inside: bool
    finite: int
    parameter: str


def all_finite(reports: Sequence[Mapping[str, Tensor]], device: torch.device) -> bool:
    """Return whether the reports of all ranks' losses are free of NaN and Inf (a collective over all ranks)."""
    wrong = torch.tensor(sum(not _is_finite(value) for report in reports for value in report.values()), device=device)
    dist.all_reduce(wrong)
    return int(wrong) == 0


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
    names = sorted({name for report in reports for name, value in report.items() if not _is_finite(value)})
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
            with _OutputGradients(chunks) as outputs, _without_reduction(chunks):
                compute(micro_batches[start : start + size])
            for index, chunk in enumerate(chunks):
                finding = _first_of(chunk, part, _chunks_after(index, len(chunks), pg), outputs.of_chunk[index])
                first = min((place for place in (first, finding) if place is not None), default=None)
    return first


def _is_finite(tensor: Tensor) -> bool:
    """Return whether no value is NaN or Inf."""
    return bool(torch.isfinite(tensor).all())


def _chunks_after(index: int, chunks: int, pg: ProcessGroupCollection) -> int:
    return chunks * pg.pp.size() - 1 - (index * pg.pp.size() + pg.pp.rank())


class _OutputGradients:
    """Context manager that notes when each module gets the gradient of its output, and whether it is finite.

    Attributes:
        of_chunk: for every chunk, when each module got the gradient of its output, and whether it was finite.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.of_chunk: list[dict[nn.Module, tuple[int, bool]]] = [{} for _ in chunks]
        self._hooks = [
            module.register_forward_hook(self._hook(noted))
            for chunk, noted in zip(chunks, self.of_chunk, strict=True)
            for module in chunk.modules()
        ]

    def __enter__(self) -> _OutputGradients:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, noted: dict[nn.Module, tuple[int, bool]]) -> Callable[..., None]:
        def after_forward(module: nn.Module, _: Any, output: Any) -> None:
            def note(gradient: Tensor) -> None:
                point, finite = noted.get(module, (len(noted), True))
                noted[module] = point, finite and _is_finite(gradient)

            for value in output if isinstance(output, tuple) else (output,):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(note)

        return after_forward


def _first_of(
    chunk: nn.Module, part: int, chunks_after: int, outputs: dict[nn.Module, tuple[int, bool]]
) -> GradientFinding | None:
    """Return the parameter whose module was the first to get the gradient of its output."""
    findings = []
    for prefix, module in unwrap_model(chunk).named_modules():
        gradients = {
            name: gradient
            for name, parameter in module.named_parameters(recurse=False)
            if (gradient := getattr(parameter, "main_grad", None)) is not None
        }
        wrong = [name for name, gradient in gradients.items() if not _is_finite(gradient)]
        noted = outputs.get(module, (len(outputs), True))
        place = (part, chunks_after, *noted, len(gradients) - len(wrong))
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
