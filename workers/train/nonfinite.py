"""Report gradients that are not finite: on which rank, in which loss, in which parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mcontroller.errors import MControllerError
from parallel_state.agreement import all_gather_values
from workers.train.nonfinite_origin import GradientFinding, is_finite

__all__ = ["NonFiniteGradient", "all_finite", "raise_nonfinite"]


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


def all_finite(reports: Sequence[Mapping[str, Tensor]], device: torch.device) -> bool:
    """Return whether the reports of all ranks' losses are free of NaN and Inf (a collective over all ranks)."""
    wrong = torch.tensor(sum(not is_finite(value) for report in reports for value in report.values()), device=device)
    dist.all_reduce(wrong)
    return int(wrong) == 0


def raise_nonfinite(
    method: str,
    step: int,
    grad_norm: float,
    reports: Sequence[Mapping[str, Tensor]],
    gradient: GradientFinding | None,
    coordinates: str,
) -> None:
    """Raise NonFiniteGradient on every rank, with the findings of all of them (a collective over all ranks).

    Args:
        method: the worker method that trained.
        step: number of steps that the optimizer has made.
        grad_norm: norm of the gradients.
        reports: the reports of this rank's losses for the mini-batch.
        gradient: this rank's ``first_nonfinite_gradient``.
        coordinates: of this rank, for the message.
    """
    names = sorted({name for report in reports for name, value in report.items() if not is_finite(value)})
    findings = list(enumerate(all_gather_values((coordinates, names, gradient))))
    ranks = [rank for rank, (_, wrong, _) in findings if wrong]
    gradients = {rank: found for rank, (_, _, found) in findings if found is not None}
    origin = min(gradients, key=lambda rank: (gradients[rank], rank), default=None)
    origins = [f"{', '.join(wrong)} on rank {rank} ({place})" for rank, (place, wrong, _) in findings if wrong][:1]
    if origin is not None:
        place = findings[origin][1][0]
        origins.append(f"the gradient of {gradients[origin].parameter} on rank {origin} ({place})")
    elif not origins:
        origins.append("only the sum of the gradients, which are finite on every rank")
    raise NonFiniteGradient(
        f"{method}, optimizer step {step}: not finite: {'; '.join(origins)}; gradient norm {grad_norm}. The weights "
        "are unchanged. Check the batch, lower the learning rate, or set optim.on_nonfinite=skip",
        method=method,
        step=step,
        grad_norm=grad_norm,
        ranks=ranks,
        parameters={rank: found.parameter for rank, found in gradients.items()},
        origin=origin,
    )
