"""Checks of values that must be equal, or must differ, on the members of a group of simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallel_state.simulated.calls import Call
from parallel_state.simulated.errors import Disagreement, UnsupportedError
from parallel_state.simulated.exchange import equal_values
from parallel_state.simulated.process_group import SimulatedGroup

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
        UnsupportedError: this is no simulated rank.
    """
    _compare(values, group, what, equal=True)


def require_different(values: Values, group: dist.ProcessGroup | None = None, *, what: str = "values") -> None:
    """Raise if two members of a group have the same bits (a collective); arguments as of ``require_equal``.

    Use it for random states and for data that must differ along an axis.

    Raises:
        Disagreement: two ranks have the same values.
        UnsupportedError: this is no simulated rank.
    """
    _compare(values, group, what, equal=False)


def _compare(values: Values, group: dist.ProcessGroup | None, what: str, equal: bool) -> None:
    member: Any = group if group is not None else dist.group.WORLD
    if not isinstance(member, SimulatedGroup):
        raise UnsupportedError(f"{what} are compared on simulated ranks only; the group is {member!r}", ranks=())
    named = {"": values} if isinstance(values, torch.Tensor) else values
    check = _check_equal if equal else _check_different
    member.compare(list(named.values()), what, equal, lambda calls, describe: check(calls, describe, what, list(named)))


def _check_equal(calls: Sequence[Call], describe: Callable[[int], str], what: str, names: list[str]) -> None:
    for call in calls[1:]:
        first = calls[0]
        if len(call.inputs) != len(first.inputs):
            counts = f"{len(first.inputs)} and {len(call.inputs)} tensors"
            raise _disagreement(f"{what} are {counts}", [first, call], describe)
        for name, some, other in zip(names, first.inputs, call.inputs, strict=True):
            if not _same_bits(some, other):
                rest = [other for other in calls if _same_bits(other.inputs[names.index(name)], some)]
                holders = [other.rank for other in rest]
                named = f" {name!r}" if name else ""
                raise _disagreement(f"{what}{named} differ; equal on ranks {holders} only", [first, call], describe)


def _check_different(calls: Sequence[Call], describe: Callable[[int], str], what: str, names: list[str]) -> None:
    for index, call in enumerate(calls):
        for other in calls[:index]:
            if all(map(_same_bits, call.inputs, other.inputs)):
                raise _disagreement(f"{what} are equal, and must differ", [other, call], describe)


def _disagreement(reason: str, calls: list[Call], describe: Callable[[int], str]) -> Disagreement:
    stories = "\n".join(f"{describe(call.rank)}: {call}\n    at {call.line}" for call in calls)
    return Disagreement(f"{reason}\n\n{stories}", ranks=tuple(call.rank for call in calls))


def _same_bits(some: torch.Tensor, other: torch.Tensor) -> bool:
    return some.shape == other.shape and some.dtype == other.dtype and equal_values(some, other)
