"""GroupCall: a method that was sent to the ranks of a group, until its caller has read what they return."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ray.exceptions import GetTimeoutError
from typing_extensions import Buffer

from mcontroller.channel.hub import Hub
from mcontroller.channel.queries import ask, notify, notify_from_finalizer
from mcontroller.errors import CallRejected, GroupError
from mcontroller.ray.process_handles import ProcessHandles
from mcontroller.ray.values.handles import ArgumentFailed, KeptValues, RemoteValue, ValuesLate, fetch
from mcontroller.ray.values.wire import decode

QUERY_SECONDS = 5.0
"""Timeout of out-of-band queries."""

VALUES_LATE = "has ended, but its values did not arrive in"


class CallState(enum.Enum):
    """The state of a call, as far as the controller knows it."""

    SENT = "sent"
    """No rank has answered."""
    RUNNING = "running"
    """A rank has answered, others have not; or the first cause of a failure is still looked for."""
    ANSWERED = "answered"
    """Every rank has answered, with a value."""
    FAILED = "failed"
    """It has an error. If every rank has rejected it, the group is usable."""
    CANCELLED = "cancelled"
    """Its caller has cancelled it: all ranks run it or none, and its values are dropped."""


class GroupCall:
    """A call that was sent to its ranks; see ``mcontroller.transport.InFlightCall``.

    ``GroupProcesses`` sends it, adds the answers, and sets the error.

    Args:
        handles: the processes of the group.
        hub: the connections to them.
        time_out: ends the group if the call is late: called with role, method, ranks, the late ones, the seconds that
            have passed, and what the call lacks; returns the error.
        role: the role that is called.
        method: name of the method, in messages.
        ranks: the ranks that run it.
        returning: the ranks whose values come back, in the order of the results.
        timeout: deadline in seconds from now; None for no deadline.
        keep: whether the values stay in the processes until they are asked for.
        number: number of the call at this controller.

    Attributes:
        started: when the call was made, by ``time.monotonic``.
        pending: the ranks that have not answered.
        failing: whether a rank has answered with an error that ends the group, whose first cause is looked for.
        sent: the message to each rank that it was sent to, until all have answered.
        held: what must exist until all have answered: the handles and references in its arguments.
        rejections: the errors of the ranks that have rejected it before they changed anything, by rank.
        rejected_since: when the first rank rejected it, by ``time.monotonic``.
        error: what every read of the result raises.
    """

    def __init__(
        self,
        handles: ProcessHandles,
        hub: Hub,
        time_out: Callable[[str, str, Sequence[int], Sequence[int], float, str], GroupError],
        role: str,
        method: str,
        ranks: tuple[int, ...],
        returning: Sequence[int],
        *,
        timeout: float | None,
        keep: bool,
        number: int,
    ) -> None:
        self._handles, self._hub, self._time_out = handles, hub, time_out
        self.role, self.method, self.number = role, method, number
        self.ranks, self.returning, self.keep = ranks, returning, keep
        self.timeout = timeout
        self.started = time.monotonic()
        self.pending = set(ranks)
        self.failing = False
        self.sent: dict[int, list[bytes]] = {}
        self.held: list[Any] = []
        self.rejections: dict[int, CallRejected] = {}
        self.rejected_since = 0.0
        self.error: GroupError | None = None
        self._cancelled = False
        self._returned = frozenset(returning)
        self._answers: dict[int, tuple[Buffer, Sequence[Buffer]]] = {}
        self._stored: list[int] = []
        self._values: list[Any] | None = None
        self._kept = self._keep_values() if keep else None

    @property
    def state(self) -> CallState:
        """The state of the call."""
        if self._cancelled:
            return CallState.CANCELLED
        if self.error is not None:
            return CallState.FAILED
        if self.failing or self.pending:
            return CallState.SENT if len(self.pending) == len(self.ranks) else CallState.RUNNING
        return CallState.ANSWERED

    def remaining(self, timeout: float | None = None) -> float | None:
        """Return the seconds until the deadline, or ``timeout`` if that is less; None for no limit."""
        limits = [] if timeout is None else [timeout]
        if self.timeout is not None:
            limits.append(self.started + self.timeout - time.monotonic())
        return max(0.0, min(limits)) if limits else None

    def add(self, rank: int, data: Buffer, frames: Sequence[Buffer], stored: bool) -> None:
        """Keep the answer of a rank until it is read; if it is in the object store, until it is released there."""
        if not self.keep and rank in self._returned:
            self._answers[rank] = data, frames
            if stored:
                self._stored.append(rank)
                self._kept = self._kept or self._keep_values()

    # ---- what its caller does with it --------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for every rank and return the values; see ``InFlightCall.result``."""
        limit, began = self.timeout if timeout is None else timeout, time.monotonic()
        self.check(timeout)
        if self._values is None:
            if self.keep and self._handles.ended:
                raise self._ended()
            try:
                left = None if limit is None else max(0.0, began + limit - time.monotonic())
                self._values = self._read(left)
            except ValuesLate as late:
                ids = self._handles.actor_ids
                ranks = [ids.index(handle.actor) for handle in late.handles] or self.ranks
                self.error = self._time_out(self.role, self.method, ranks, ranks, limit or 0.0, VALUES_LATE)
                raise self.error from None
            self._answers.clear()
            self._kept = None
        return self._values

    def check(self, timeout: float | None = None) -> None:
        """Wait for every rank and raise the error of the call, if it failed.

        Raises:
            CallRejected: the method raised on every rank before it changed anything. The group is usable.
            WorkerError: the method raised on a rank, or a call before this one did, which is the first cause.
            WorkerDied: the process of a rank ended.
            ConnectionLost: a process cannot be reached any more, although it exists.
            CallTimeout: the deadline passed.
            GroupBroken: the group was broken before the values were read.
        """
        if not self.wait(timeout):
            self.end_late(timeout)
        if self.error is not None:
            raise self.error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every rank has answered or failed; return whether that happened in time."""
        ended = self._is_complete() or self._handles.ended
        if not ended and not self._hub.wait(self._is_complete, self.remaining(timeout)):
            if self.remaining() != 0.0:
                return False
            self.end_late(None)
        if not self._is_complete():  # the group has ended
            self.error = self._ended()
        return True

    def done(self) -> bool:
        """Whether every rank has answered or failed. Does not wait."""
        return self.wait(0.0)

    def cancel(self) -> None:
        """Cancel the call on all ranks if none has started it; otherwise all run it, and the values are dropped."""
        if self._values is not None or self.error is not None:
            return
        self._cancelled = self.state is not CallState.ANSWERED
        self.error = GroupError(f"{self.role}.{self.method} was cancelled", role=self.role, method=self.method)
        if self._handles.ended:
            return
        addresses = [self._handles.infos[rank].address for rank in self.ranks]
        on_all = False
        try:
            answers = ask(addresses, "prepare", self._hub.name, self.number, timeout=QUERY_SECONDS)
            on_all = all(answer is not None and answer[0] for answer in answers)
        finally:  # a rank that prepared and gets no decision would wait forever
            notify(addresses, "commit", self._hub.name, self.number, on_all)

    def read_before_end(self, timeout: float) -> bool:
        """Read values that the processes keep, because they are about to be ended; return whether all are read.

        Args:
            timeout: seconds to wait for them.
        """
        if self.keep and self._values is None and self.state is CallState.ANSWERED:
            try:
                self._values = fetch(self.parts, timeout)
            except ValuesLate:
                return False
            except (GroupError, ArgumentFailed):  # the reader gets the reason why the group ended
                pass
        return True

    @property
    def parts(self) -> list[Any]:
        """Handles of the returned values, in the order of the results."""
        return [self._handle(rank, outline=False) for rank in self.returning]

    @property
    def outlines(self) -> list[Any]:
        """Handles of the outlines of the returned values; empty unless they are kept on the ranks."""
        return [self._handle(rank, outline=True) for rank in self.returning] if self.keep else []

    @property
    def is_read(self) -> bool:
        """Whether the values are in this process."""
        return self._values is not None

    # ------------------------------------------------------------------------------------------------------------------

    def _is_complete(self) -> bool:
        return self.error is not None or not (self.pending or self.failing)

    def end_late(self, timeout: float | None) -> None:
        """End the group because the call is late, after ``timeout`` seconds; None for its deadline."""
        limit = min(limit for limit in (self.timeout, timeout) if limit is not None)
        self.error = self._time_out(self.role, self.method, self.ranks, sorted(self.pending), limit, "had no answer in")

    def _ended(self) -> GroupError:
        """Return the reason why the call cannot be completed, or its values be read any more."""
        cause = self._handles.cause
        if cause is None:
            text = f"group {self.role} was shut down before {self.method} was complete, or before its result was read"
            return GroupError(text, role=self.role)
        return self._handles.broken_error(self.role) if self._is_complete() else cause

    def _read(self, timeout: float | None) -> list[Any]:
        if self.keep:
            return fetch(self.parts, timeout)
        try:
            return decode([self._answers[rank] for rank in self.returning], timeout)
        except GetTimeoutError:
            raise ValuesLate([self._handle(rank, outline=False) for rank in self._stored]) from None

    def _handle(self, rank: int, *, outline: bool) -> RemoteValue:
        address, actor = self._handles.infos[rank].address, self._handles.actors[rank]._actor_id.hex()
        return RemoteValue(address, actor, self._hub.name, self.number, outline, self._kept)

    def _keep_values(self) -> KeptValues:
        return KeptValues(partial(_release, self._handles, tuple(self.returning), self._hub.name, self.number))


def _release(handles: ProcessHandles, ranks: Sequence[int], caller: bytes, number: int) -> None:
    """Release the result of a call on ranks, unless their processes have been ended."""
    if not handles.killed:
        notify_from_finalizer([handles.infos[rank].address for rank in ranks], "release", caller, number)
