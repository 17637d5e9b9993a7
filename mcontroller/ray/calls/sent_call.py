"""SentCall: a call that was sent to ranks, until all of them have answered."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from mcontroller.channel.local_connection import OutgoingMessage
from mcontroller.channel.messages import CallHead, pack_call
from mcontroller.errors import CallRejected, GroupError

__all__ = ["SentCall"]


class SentCall:
    """A method that was sent to ranks, as supervision sees it.

    Attributes:
        role: the role that is called.
        method: name of the method.
        ranks: the ranks that run it.
        timeout: deadline in seconds after ``started``; None for no deadline.
        number: number of the call among those of this controller.
        started: when the call was made, by ``time.monotonic``.
        pending: the ranks that have not answered.
        sent: the message to each rank that it was sent to, until the call is complete.
        held: what must exist until the call is complete: the handles and references in its arguments.
        failed: whether a rank has answered with an error.
        rejections: the errors of the ranks that have rejected the call before they changed anything, by rank.
        rejected: the error of the call, if every rank has rejected it.
        error: what every later read of the result raises: the failure that a wait has found, or a cancellation.
        rejected_since: when the first rank rejected it, by ``time.monotonic``.
    """

    def __init__(
        self, role: str, method: str, ranks: tuple[int, ...], *, timeout: float | None = None, number: int
    ) -> None:
        self.role = role
        self.method = method
        self.ranks = ranks
        self.timeout = timeout
        self.number = number
        self.started = time.monotonic()
        self.pending = set(ranks)
        self.sent: dict[int, OutgoingMessage] = {}
        self.held: list[Any] = []
        self.failed = False
        self.rejections: dict[int, CallRejected] = {}
        self.rejected: CallRejected | None = None
        self.error: GroupError | None = None
        self.rejected_since = 0.0

    def remaining(self, timeout: float | None = None) -> float | None:
        """Return the seconds until the deadline, or ``timeout`` if that is less; None for no limit."""
        limits = [] if timeout is None else [timeout]
        if self.timeout is not None:
            limits.append(self.started + self.timeout - time.monotonic())
        return max(0.0, min(limits)) if limits else None

    def outgoing(
        self, messages: Iterable[tuple[CallHead, tuple[bytes, list[bytes]]]]
    ) -> Iterator[tuple[int, OutgoingMessage]]:
        """Yield the message for each rank, and keep it to be sent again if the connection is lost.

        Args:
            messages: for each rank the head and the message, its body and further frames. Ranks that get the same
                arguments have the same message.
        """
        packed: dict[tuple[CallHead, int], OutgoingMessage] = {}
        for rank, (head, message) in zip(self.ranks, messages, strict=True):
            key = head, id(message)
            if key not in packed:
                body, frames = message
                packed[key] = OutgoingMessage([pack_call(head, body), *frames])
            self.sent[rank] = packed[key]
            yield rank, packed[key]

    def take(self, rank: int, content: tuple[Any, ...], frames: list[Any]) -> None:
        """Keep the answer of a rank. The base class drops it."""

    def read_before_end(self, timeout: float) -> bool:
        """Read values that the processes keep, because they are about to be ended; return whether all are here.

        The base class has none.

        Args:
            timeout: seconds to wait for them.
        """
        return True
