"""The text of a deadlock of simulated ranks: its cause, and for every rank where it is and whom it waits for."""

from __future__ import annotations

from typing import Protocol

from parallel_state.hangs.report import Position, cause_of, describe_ranks, stories
from parallel_state.simulated.calls import Call
from parallel_state.simulated.scheduler import RankThread
from parallel_state.simulated.store import KeyWait

__all__ = ["Simulated", "deadlock_text", "positions_text"]


class Simulated(Protocol):
    """What a report needs of a simulation."""

    @property
    def ranks(self) -> list[RankThread]:
        """All ranks."""

    def describe(self, rank: int) -> str:
        """Return a rank with its coordinates."""

    def missing(self, call: Call) -> list[int]:
        """Return the ranks that a call waits for."""


def deadlock_text(simulated: Simulated) -> tuple[str, tuple[int, ...]]:
    """Return the message of a deadlock, and the ranks that it names as the cause."""
    observed, positions = _Ranks(simulated), _positions(simulated)
    cause, ranks = cause_of(observed, positions) or _without_keys(simulated, positions)
    size = len(simulated.ranks)
    head = f"{cause}\n\nnone of the {len(positions)} ranks that have not ended can go on ({size} ranks in all)"
    return f"{head}\n\n{stories(observed, positions)}", ranks


def positions_text(simulated: Simulated) -> str:
    """Return where the ranks are that have not ended, for the note of another rank's error."""
    observed, waiting = _Ranks(simulated), _positions(simulated)
    ready = [each.rank for each in simulated.ranks if not each.ended and each.rank not in waiting]
    parts = [f"{describe_ranks(observed, ready)}: can go on"] if ready else []
    if waiting:
        parts.append(stories(observed, waiting))
    return "\n".join(parts) or "all other ranks have ended"


def _positions(simulated: Simulated) -> dict[int, Position]:
    positions = {}
    for each in simulated.ranks:
        waiting = each.waits_for
        if not each.ended and waiting is not None:
            assert isinstance(waiting, Call | KeyWait)
            missing = simulated.missing(waiting) if isinstance(waiting, Call) else []
            positions[each.rank] = Position(str(waiting), str(waiting.line), tuple(missing))
    return positions


def _without_keys(simulated: Simulated, positions: dict[int, Position]) -> tuple[str, tuple[int, ...]]:
    keys = sorted({str(simulated.ranks[rank].waits_for) for rank in positions})
    return f"no rank will set the keys of {', '.join(keys)}", tuple(positions)


class _Ranks:
    """The ranks of a simulation as a report sees them; see ``Observed``."""

    def __init__(self, simulated: Simulated) -> None:
        self._ranks = simulated.ranks
        self.describe = simulated.describe

    def activity(self, rank: int) -> str:
        each = self._ranks[rank]
        if each.error is not None:
            return f"raised {type(each.error).__name__}: {str(each.error).partition(chr(10))[0]}"
        if each.ended:
            return "has ended"
        return "can go on" if each.waits_for is None else f"waits in {each.waits_for}"

    def progress(self, waiting: int, other: int) -> list[str]:
        call = self._ranks[waiting].waits_for
        if not isinstance(call, Call) or call.is_transfer:
            return []
        if other not in call.group.created_by:
            return [f"and has not created this group (rank {call.group.creator} did at {call.group.line})"]
        last = call.group.last_calls.get(other)
        if last is None:
            return ["and has not called any collective of this group"]
        return [f"its last on this group: {last.operation}, call {last.number}, at {last.line}"]
