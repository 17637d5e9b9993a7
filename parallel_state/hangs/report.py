"""The text of a hang: its cause, and for every rank that waits its call, its line and the ranks that are missing.

Simulated ranks and real worker processes share it. No torch: a controller reports without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from parallel_state.hangs.lines import members_text

__all__ = ["Observed", "Position", "cause_of", "describe_ranks", "rank_text", "stories"]

_SHOWN_STORIES = 40
_SHOWN_MISSING = 4


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank waits.

    Attributes:
        call: The text of its call.
        line: The line that made the call.
        missing: The ranks that the call waits for.
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
        observed: The ranks.
        positions: Where the waiting ranks wait, by rank.

    Returns:
        The cause and the ranks that it names; None if no rank is missing.
    """
    cycle: list[int] = []
    for start in positions:
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
    for rank, position in positions.items():
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
