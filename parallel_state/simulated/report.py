"""The text of a deadlock: its cause, and for every rank where it is and whom it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from parallel_state.simulated.calls import Call, members_text
from parallel_state.simulated.scheduler import RankThread
from parallel_state.simulated.store import KeyWait

__all__ = ["Observed", "cause_of", "deadlock_text", "positions"]

_SHOWN_STORIES = 40
_SHOWN_MISSING = 4


class Observed(Protocol):
    """What a report needs of a simulation."""

    @property
    def ranks(self) -> list[RankThread]:
        """All ranks."""

    def describe(self, rank: int) -> str:
        """Return a rank with its coordinates."""

    def missing(self, call: Call) -> list[int]:
        """Return the ranks that a call waits for."""


def deadlock_text(observed: Observed) -> tuple[str, tuple[int, ...]]:
    """Return the message of a deadlock, and the ranks that it names as the cause."""
    missing = {each.rank: _missing(observed, each) for each in observed.ranks if _waits(each)}
    cause, ranks = cause_of(observed, missing)
    size = len(observed.ranks)
    head = f"{cause}\n\nnone of the {len(missing)} ranks that have not ended can go on ({size} ranks in all)"
    return f"{head}\n\n{_stories(observed, missing)}", ranks


def positions(observed: Observed) -> str:
    """Return where the ranks are that have not ended, for the note of another rank's error."""
    waiting = {each.rank: _missing(observed, each) for each in observed.ranks if _waits(each)}
    ready = [each.rank for each in observed.ranks if not each.ended and not _waits(each)]
    parts = [f"{_ranks(observed, ready)}: can go on"] if ready else []
    if waiting:
        parts.append(_stories(observed, waiting))
    return "\n".join(parts) or "all other ranks have ended"


def cause_of(observed: Observed, missing: Mapping[int, list[int]]) -> tuple[str, tuple[int, ...]]:
    """Follow who waits for whom, to a rank that will never come or round a cycle.

    Args:
        observed: The simulation.
        missing: Waiting rank -> the ranks that it waits for.
    """
    cycle: list[int] = []
    for start in missing:
        path = [start]
        while True:
            following = missing[path[-1]]
            ended = [rank for rank in following if rank not in missing]
            if ended:
                text = f"{observed.describe(ended[0])} has ended, and rank {path[-1]} waits for it"
                return text, (ended[0], path[-1])
            if not following:
                break
            if following[0] in path:
                cycle = cycle or [*path[path.index(following[0]) :], following[0]]
                break
            path.append(following[0])
    if cycle:
        return f"ranks wait for each other: {' -> '.join(map(str, cycle))}", tuple(cycle[:-1])
    keys = [observed.ranks[rank].waits_for for rank in missing]
    return f"no rank will set the keys of {', '.join(sorted({str(each) for each in keys}))}", tuple(missing)


def _waits(rank: RankThread) -> bool:
    return not rank.ended and rank.waits_for is not None


def _missing(observed: Observed, rank: RankThread) -> list[int]:
    return observed.missing(rank.waits_for) if isinstance(rank.waits_for, Call) else []


def _stories(observed: Observed, missing: Mapping[int, list[int]]) -> str:
    """Return one entry for all ranks that wait at the same place for the same ranks."""
    same: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for rank, others in missing.items():
        waiting = observed.ranks[rank].waits_for
        assert isinstance(waiting, Call | KeyWait)
        same.setdefault((str(waiting), str(waiting.line), tuple(others)), []).append(rank)
    entries = [_story(observed, *key, ranks) for key, ranks in list(same.items())[:_SHOWN_STORIES]]
    if len(same) > _SHOWN_STORIES:
        entries.append(f"... and {len(same) - _SHOWN_STORIES} more entries")
    return "\n".join(entries)


def _story(observed: Observed, call: str, line: str, missing: tuple[int, ...], ranks: list[int]) -> str:
    lines = [f"{_ranks(observed, ranks)}: {call}", f"    at {line}"]
    for other in missing[:_SHOWN_MISSING]:
        lines.append(f"    waits for {observed.describe(other)}, which {_activity(observed.ranks[other])}")
        lines += _progress(observed.ranks[ranks[0]], other)
    if len(missing) > _SHOWN_MISSING:
        lines.append(f"    ... and for {len(missing) - _SHOWN_MISSING} more: {members_text(missing)}")
    return "\n".join(lines)


def _ranks(observed: Observed, ranks: list[int]) -> str:
    return observed.describe(ranks[0]) if len(ranks) == 1 else f"ranks {members_text(ranks)}"


def _activity(rank: RankThread) -> str:
    if rank.error is not None:
        return f"raised {type(rank.error).__name__}: {str(rank.error).partition(chr(10))[0]}"
    if rank.ended:
        return "has ended"
    return "can go on" if rank.waits_for is None else f"waits in {rank.waits_for}"


def _progress(waiting: RankThread, other: int) -> list[str]:
    """Return how far a missing rank has come on the group of the call."""
    call = waiting.waits_for
    if not isinstance(call, Call) or call.is_transfer:
        return []
    if other not in call.group.created_by:
        return [f"        and has not created this group (rank {call.group.creator} did at {call.group.line})"]
    last = call.group.last_calls.get(other)
    if last is None:
        return ["        and has not called any collective of this group"]
    return [f"        its last on this group: {last.operation}, call {last.number}, at {last.line}"]
