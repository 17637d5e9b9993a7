"""The text of a hang: its cause, and for every rank that waits its call, its line and the ranks that are missing.

Simulated ranks and real worker processes share it. No torch: a controller reports without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from parallel_state.axes import EXPERT_AXES, dense_grid, expert_grid
from parallel_state.hangs.lines import members_text
from parallel_state.hangs.record import DONE, RETURNED, LastCall, RankRecord, RecordedGroup, Route

_SHOWN_STORIES = 40
_SHOWN_MISSING = 4
_OTHER_SIDE = {"send": "recv", "recv": "send"}
_OWN_SHAPES = ("all_to_all", "all_to_all_single", "gather", "scatter", "barrier")
_NO_CALL = "and has not called any collective of this group"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank waits.

    Attributes:
        call: the text of its call.
        line: the line that made the call.
        missing: the ranks that the call waits for.
    """

    call: str
    line: str
    missing: tuple[int, ...]


class Observed(Protocol):
    """What a report needs of the ranks."""

    def describe(self, rank: int) -> str:
        """Return a rank with its coordinates."""

    def activity(self, rank: int) -> str:
        """Return what a rank does, such as "has ended"."""

    def progress(self, waiting: int, other: int) -> Sequence[str]:
        """Return how far a missing rank has come on the group of the call that another rank waits in."""


def cause_of(observed: Observed, positions: Mapping[int, Position]) -> tuple[str, tuple[int, ...]] | None:
    """Follow who waits for whom, to a rank that does not wait or round a cycle.

    Args:
        observed: the ranks.
        positions: where the waiting ranks wait, by rank.

    Returns:
        The cause and the ranks that it names; None if no rank is missing.
    """
    cycle: list[int] = []
    for start in sorted(positions):
        path = [start]
        while True:
            following = positions[path[-1]].missing
            elsewhere = [rank for rank in following if rank not in positions]
            if elsewhere:
                other = elsewhere[0]
                text = f"{observed.describe(other)} {observed.activity(other)}, and rank {path[-1]} waits for it"
                return text, (other, path[-1])
            if not following:
                break
            if following[0] in path:
                cycle = cycle or [*path[path.index(following[0]) :], following[0]]
                break
            path.append(following[0])
    if cycle:
        return f"ranks wait for each other: {' -> '.join(map(str, cycle))}", tuple(cycle[:-1])
    return None


def stories(observed: Observed, positions: Mapping[int, Position]) -> str:
    """Return one entry for all ranks that wait at the same place for the same ranks."""
    same: dict[Position, list[int]] = {}
    for rank, position in sorted(positions.items()):
        same.setdefault(position, []).append(rank)
    entries = [_story(observed, position, ranks) for position, ranks in list(same.items())[:_SHOWN_STORIES]]
    if len(same) > _SHOWN_STORIES:
        entries.append(f"... and {len(same) - _SHOWN_STORIES} more entries")
    return "\n".join(entries)


def _story(observed: Observed, position: Position, ranks: list[int]) -> str:
    lines = [f"{describe_ranks(observed, ranks)}: {position.call}", f"    at {position.line}"]
    for other in position.missing[:_SHOWN_MISSING]:
        lines.append(f"    waits for {observed.describe(other)}, which {observed.activity(other)}")
        lines += [f"        {line}" for line in observed.progress(ranks[0], other)]
    if len(position.missing) > _SHOWN_MISSING:
        count = len(position.missing) - _SHOWN_MISSING
        lines.append(f"    ... and for {count} more: {members_text(position.missing)}")
    return "\n".join(lines)


def describe_ranks(observed: Observed, ranks: Sequence[int]) -> str:
    """Return one rank with its coordinates, or several ranks."""
    return observed.describe(ranks[0]) if len(ranks) == 1 else f"ranks {members_text(ranks)}"


def rank_text(rank: int, coordinates: Mapping[str, int]) -> str:
    """Return a rank with its index on axes, such as ``rank 3 (tp=1 pp=1)``."""
    text = " ".join(f"{axis}={index}" for axis, index in coordinates.items())
    return f"rank {rank} ({text})" if text else f"rank {rank}"


def axes_of_group(members: Sequence[Mapping[str, int]], description: str) -> str:
    """Return the axes on which the members of a group differ, such as ``"tp"`` or ``"dp-cp"``.

    Args:
        members: the coordinates of the members.
        description: Megatron's name of the group.
    """
    axes = (expert_grid if description.startswith("EXPERT") else dense_grid)(members[0])
    return "-".join(axis for axis in axes if len({member[axis] for member in members}) > 1)


class RecordedRanks:
    """The ranks of a group of processes as a report sees them, from the records of their last calls.

    A rank that has made the n-th collective of a group waits for the members that have made fewer than n. A rank has
    made a transfer, and waits if the other side has made fewer on the same route. On NCCL a wait ends before the
    collective does, so the first call that others have not made is where a rank waits.

    Args:
        records: the record of each rank that could be read.
        coordinates: index on each axis, by rank; empty if unknown.
        ended: the ranks that run no call any more.
        activities: what ranks do that are in no collective, such as "is stopped by a signal".
        stopped: the ranks that the kernel does not let run.
    """

    def __init__(
        self,
        records: Mapping[int, RankRecord],
        coordinates: Sequence[Mapping[str, int]],
        *,
        ended: Collection[int] = (),
        activities: Mapping[int, str] | None = None,
        stopped: Collection[int] = (),
    ) -> None:
        self._records, self._coordinates = records, coordinates
        self._ended, self._activities, self._stopped = ended, activities or {}, stopped
        self._axes = [
            axis
            for axis in (coordinates[0] if coordinates else ())
            if axis not in EXPERT_AXES and any(coordinate[axis] for coordinate in coordinates)
        ]
        self._calls: dict[int, LastCall] = {}
        self._positions = self._find_positions()

    def report(self) -> tuple[str, str]:
        """Return the cause, and an entry for the ranks that wait; both are empty if no rank waits in a collective."""
        if not self._positions:
            return "", ""
        mismatch = self._mismatch()
        causes = cause_of(self, self._positions)
        cause = mismatch or (causes[0] if causes else "no rank is missing: all members have made the calls")
        return cause, stories(self, self._positions)

    def describe(self, rank: int) -> str:
        """Return a rank with its index on every axis of more than one rank."""
        if rank >= len(self._coordinates):
            return f"rank {rank}"
        return rank_text(rank, {axis: self._coordinates[rank][axis] for axis in self._axes})

    def activity(self, rank: int) -> str:
        """Return what a rank does."""
        if rank in self._positions:
            return f"waits in {self._positions[rank].call}"
        if rank in self._ended:
            return "has ended"
        return self._activities.get(rank, "is in no collective")

    def progress(self, waiting: int, other: int) -> list[str]:
        """Return how far a missing rank has come on the group of the call that another rank waits in."""
        route = self._calls[waiting].route
        if route.kind != "collective":
            return []
        record = self._records.get(other)
        if record is None:
            return ["its record could not be read"]
        last = next((call for call in reversed(record.calls) if call.route == route), None)
        if last is not None:
            return [f"its last on this group: {last.operation}, call {last.index}, at {last.line}"]
        count = record.counts.get(route, 0)
        return [f"its last on this group: call {count - 1}"] if count else [_NO_CALL]

    def _find_positions(self) -> dict[int, Position]:
        positions = {}
        for rank, record in self._records.items():
            if rank in self._ended or rank in self._stopped:
                continue
            call = self._waits_in(rank, record)
            if call is not None:
                self._calls[rank] = call
                missing = tuple(self._missing(rank, call))
                positions[rank] = Position(call.text(self._axis(call.route.group)), call.line, missing)
        return positions

    def _waits_in(self, rank: int, record: RankRecord) -> LastCall | None:
        """Return the call in which a rank waits: that of its thread, or on NCCL the first that others have not made."""
        waiting = [call for call in record.calls if call.state not in (RETURNED, DONE)]
        on_device = (call for call in record.calls if call.route.group.backend == "nccl")
        return next((call for call in on_device if self._missing(rank, call)), waiting[-1] if waiting else None)

    def _missing(self, rank: int, call: LastCall) -> list[int]:
        """Return the ranks that have not made their part of a call; if all have, those of them that are stopped."""
        route, ranks = call.route, call.route.group.ranks
        if route.kind == "collective":
            parts = {other: self._count(other, route) for other in ranks if other != rank}
        else:
            others = [route.peer] if route.peer >= 0 else [other for other in ranks if other != rank]
            parts = {other: self._transfers(other, rank, route) for other in others}
        missing = [other for other, count in parts.items() if count <= call.index]
        return missing or [other for other in parts if other in self._stopped]

    def _count(self, rank: int, route: Route) -> int:
        record = self._records.get(rank)
        return 0 if record is None else record.counts.get(route, 0)

    def _transfers(self, rank: int, with_rank: int, route: Route) -> int:
        kind = _OTHER_SIDE[route.kind]
        return sum(self._count(rank, Route(kind, route.group, peer, route.tag)) for peer in (with_rank, -1))

    def _mismatch(self) -> str | None:
        """Return the first two ranks whose calls are one collective and do not fit together."""
        for rank, call in self._calls.items():
            for other in call.route.group.ranks if call.route.kind == "collective" else ():
                made = self._call_of(other, call)
                reason = None if made is None else _difference(call, made)
                if made is not None and reason is not None:
                    return (
                        f"{reason}: {self.describe(rank)} made {self._of(call)}, and {self.describe(other)} made "
                        f"{self._of(made)}\n    at {made.line}"
                    )
        return None

    def _of(self, call: LastCall) -> str:
        return call.text(self._axis(call.route.group))

    def _call_of(self, rank: int, call: LastCall) -> LastCall | None:
        record = self._records.get(rank)
        calls = () if record is None else record.calls
        return next((other for other in calls if (other.route, other.index) == (call.route, call.index)), None)

    def _axis(self, group: RecordedGroup) -> str:
        """Return the axes on which the members of a group differ, such as ``"tp"`` or ``"dp-cp"``."""
        if not group.ranks or max(group.ranks) >= len(self._coordinates):
            return ""
        return axes_of_group([self._coordinates[rank] for rank in group.ranks], group.description)


def _difference(call: LastCall, other: LastCall) -> str | None:
    if call.operation != other.operation:
        return "different operations"
    if call.operation not in _OWN_SHAPES and call.tensors != other.tensors:
        return "different shapes or dtypes"
    return "different reductions or roots" if call.details != other.details else None
