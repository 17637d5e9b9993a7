"""When gradients are not finite: which rank, which loss, which parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcontroller.errors import MControllerError

__all__ = ["NonFiniteGradient", "all_finite", "raise_nonfinite"]


class NonFiniteGradient(MControllerError, ArithmeticError):
    """A NaN or Inf that reached the gradients; the weights are as they were before the step.

    Fields: ``method``, ``step`` (of the optimizer), ``grad_norm``, ``ranks`` whose own loss or metrics are not
    finite, and ``parameters``: by rank, the first one whose gradient is not finite.
    """

    method: str
    step: int
    grad_norm: float
    ranks: list[int]
    parameters: dict[int, str]


def all_finite(reports: Sequence[Mapping[str, Tensor]], device: torch.device) -> bool:
    """Whether no rank's loss reported a NaN or Inf (a collective over all ranks)."""
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
    """Raises NonFiniteGradient on every rank, with what all of them found (a collective over all ranks).

    Args:
        reports: what this rank's loss reported of the mini-batch.
        coordinates: where this rank stands, for the message.
    """
    mine = {
        "where": coordinates,
        "reports": sorted({name for report in reports for name, value in report.items() if not _finite(value)}),
        "parameter": _first_parameter(model),
    }
    found: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    sources = [rank for rank, what in enumerate(found) if what["reports"]]
    parameters = {rank: what["parameter"] for rank, what in enumerate(found) if what["parameter"]}
    origins = [f"{', '.join(found[rank]['reports'])} on rank {rank} ({found[rank]['where']})" for rank in sources[:1]]
    for rank, name in list(parameters.items())[:1]:
        origins.append(f"the gradient of {name} on rank {rank} ({found[rank]['where']})")
    raise NonFiniteGradient(
        f"{method}, optimizer step {step}: not finite: {'; '.join(origins)}; gradient norm {grad_norm}. The step was "
        "not made; look for it in the batch, lower the learning rate, or set optim.on_nonfinite=skip",
        method=method,
        step=step,
        grad_norm=grad_norm,
        ranks=sources,
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
