"""Report gradients that are not finite: on which rank, in which loss, in which parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcontroller.errors import MControllerError
from parallel_state.agreement import everyones

__all__ = ["NonFiniteGradient", "all_finite", "raise_nonfinite"]


class NonFiniteGradient(MControllerError, ArithmeticError):
    """A NaN or Inf reached the gradients; the weights are as they were before the step.

    Attributes:
        method: the worker method that trained.
        step: number of steps that the optimizer had made.
        grad_norm: norm of the gradients.
        ranks: ranks whose own loss or metrics are not finite.
        parameters: by rank, the first parameter whose gradient is not finite.
    """

    method: str
    step: int
    grad_norm: float
    ranks: list[int]
    parameters: dict[int, str]


class _Finding(NamedTuple):
    """What is not finite on one rank: names of reports, and the first parameter."""

    coordinates: str
    reports: list[str]
    parameter: str | None


def all_finite(reports: Sequence[Mapping[str, Tensor]], device: torch.device) -> bool:
    """Return whether the reports of all ranks' losses are free of NaN and Inf (a collective over all ranks)."""
    wrong = torch.tensor(sum(not _finite(value) for report in reports for value in report.values()), device=device)
    dist.all_reduce(wrong)
    return int(wrong) == 0


def raise_nonfinite(
    method: str,
    step: int,
    grad_norm: float,
    model: Sequence[nn.Module],
    reports: Sequence[Mapping[str, Tensor]],
    coordinates: str,
) -> None:
    """Raise NonFiniteGradient on every rank, with the findings of all of them (a collective over all ranks).

    Args:
        method: the worker method that trained.
        step: number of steps that the optimizer has made.
        grad_norm: norm of the gradients.
        model: this rank's model chunks, with their gradients.
        reports: the reports of this rank's losses for the mini-batch.
        coordinates: of this rank, for the message.
    """
    names = {name for report in reports for name, value in report.items() if not _finite(value)}
    findings = everyones(_Finding(coordinates, sorted(names), _first_parameter(model)))
    ranks = [rank for rank, finding in enumerate(findings) if finding.reports]
    parameters = {rank: finding.parameter for rank, finding in enumerate(findings) if finding.parameter}
    origins = [
        f"{', '.join(findings[rank].reports)} on rank {rank} ({findings[rank].coordinates})" for rank in ranks[:1]
    ]
    for rank, name in list(parameters.items())[:1]:
        origins.append(f"the gradient of {name} on rank {rank} ({findings[rank].coordinates})")
    raise NonFiniteGradient(
        f"{method}, optimizer step {step}: not finite: {'; '.join(origins)}; gradient norm {grad_norm}. The weights "
        "are unchanged. Check the batch, lower the learning rate, or set optim.on_nonfinite=skip",
        method=method,
        step=step,
        grad_norm=grad_norm,
        ranks=ranks,
        parameters=parameters,
    )


def _first_parameter(model: Sequence[nn.Module]) -> str | None:
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None and not _finite(gradient):
                return name.removeprefix("module.")
    return None


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
