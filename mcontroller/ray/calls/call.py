"""GroupCall: a method that was sent to ranks, until all of them have answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import Buffer

from mcontroller.errors import CallRejected, GroupError
from mcontroller.ray.calls.states import CALL_TRANSITIONS, CallState

__all__ = ["GroupCall"]


class GroupCall:
    """A method that was sent to ranks, as supervision sees it.

    Args:
        role: the role that is called.
        method: name of the method.
        ranks: the ranks that run it.
        returning: the ranks whose values come back, in the order of the results.
        timeout: deadline in seconds after ``started``; None for no deadline.
        keep: whether the values stay in the processes until they are asked for.
        number: number of the call among those of this controller; -1 for one that is never sent, in messages.

    Attributes:
        state: its state.
        started: when the call was made, by ``time.monotonic``.
        pending: the ranks that have not answered.
        sent: the message to each rank that it was sent to, until all have answered.
        held: what must exist until all have answered: the handles and references in its arguments.
        rejections: the errors of the ranks that have rejected it before they changed anything, by rank.
        rejected_since: when the first rank rejected it, by ``time.monotonic``.
        looked: when it was last found out who waits for whom, by ``time.monotonic``.
        looks: number of these looks.
        waits: the report of that look; empty if no rank waited.
        reported: the report that was logged last.
        error: what every read of the result raises: the failure that a wait has found, or a cancellation.
    """

    def __init__(
        self,
        role: str,
        method: str,
        ranks: tuple[int, ...],
        returning: Sequence[int] = (),
        *,
        timeout: float | None = None,
        keep: bool = False,
        number: int = -1,
    ) -> None:
        self.role = role
        self.method = method
        self.ranks = ranks
        self.returning = returning
        self.timeout = timeout
        self.keep = keep
        self.number = number
        self.state = CallState.SENT
        self.started = time.monotonic()
        self.pending = set(ranks)
        self.sent: dict[int, list[bytes]] = {}
        self.held: list[Any] = []
        self.rejections: dict[int, CallRejected] = {}
        self.rejected_since = 0.0
        self.looked, self.looks = self.started, 0
        self.waits = self.reported = ""
        self.error: GroupError | None = None

    def change(self, state: CallState) -> None:
        """Set the state; raise ValueError if it cannot follow the one before."""
        if state not in CALL_TRANSITIONS[self.state]:
            raise ValueError(f"a call that is {self.state.value} cannot become {state.value}")
        self.state = state

    def remaining(self, timeout: float | None = None) -> float | None:
        """Return the seconds until the deadline, or ``timeout`` if that is less; None for no limit."""
        limits = [] if timeout is None else [timeout]
        if self.timeout is not None:
            limits.append(self.started + self.timeout - time.monotonic())
        return max(0.0, min(limits)) if limits else None

    def take(self, rank: int, data: Buffer, frames: Sequence[Buffer], stored: bool) -> None:
        """Keep the answer of a rank. The base class drops it."""

    def read_before_end(self, timeout: float) -> bool:
        """Read values that the processes keep, because they are about to be ended; return whether all are here.

        The base class has none.

        Args:
            timeout: seconds to wait for them.
        """
        return True
