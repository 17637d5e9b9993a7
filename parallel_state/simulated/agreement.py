"""Checks of values that must be equal, or must differ, on the members of a group of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from parallel_state.agreement import all_gather_values
from parallel_state.simulated.calls import shape_text
from parallel_state.simulated.errors import Disagreement

Values = torch.Tensor | Mapping[str, torch.Tensor]


def require_equal(values: Values, group: dist.ProcessGroup | None = None, *, what: str = "values") -> None:
    """Raise unless the values are the same bits on all members of a group (a collective).

    Use it for replicated parameters, for gradients after their reduction, and for random states that must agree along
    an axis:

        require_equal(dict(model.named_parameters()), mpu.get_data_parallel_group(), what="parameters")

    Args:
        values: a tensor, or tensors by name.
        group: the group; None for all ranks.
        what: the name of the values in the message.

    Raises:
        Disagreement: the first tensor that differs, with the ranks that have each value.
    """
    (first, expected), *others = _gathered(values, group).items()
    for rank, digests in others:
        for name in [name for name in expected | digests if digests.get(name) != expected.get(name)]:
            same = [first, *(other for other, theirs in others if theirs.get(name) == expected.get(name))]
            named = f" {name!r}" if name else ""
            raise Disagreement(f"{what}{named} differ; equal on ranks {same} only, not on {rank}", ranks=(first, rank))


def require_different(values: Values, group: dist.ProcessGroup | None = None, *, what: str = "values") -> None:
    """Raise if two members of a group have the same bits (a collective); arguments as of ``require_equal``.

    Use it for random states and for data that must differ along an axis.

    Raises:
        Disagreement: two ranks have the same values.
    """
    first: dict[tuple[str, ...], int] = {}
    for rank, digests in _gathered(values, group).items():
        other = first.setdefault(tuple(digests.values()), rank)
        if other != rank:
            raise Disagreement(f"{what} are equal, and must differ, on ranks {other} and {rank}", ranks=(other, rank))


def _gathered(values: Values, group: dist.ProcessGroup | None) -> dict[int, dict[str, str]]:
    """Return the digests of values by rank and name."""
    named = {"": values} if isinstance(values, torch.Tensor) else values
    digests = {name: f"{shape_text(value)} {digest_of(value)}" for name, value in named.items()}
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return dict(zip(ranks, all_gather_values(digests, group), strict=True))


def digest_of(tensor: torch.Tensor) -> str:
    """Return a sum over the bits of a tensor."""
    return hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
