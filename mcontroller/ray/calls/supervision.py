"""The processes of a group and their calls: the states of calls and connections, the first failure, and the end.

The first failure ends every process of the group. Ranks that wait for a peer in a collective would wait forever, so
nothing more is sent to them: they are killed at once (``ProcessHandles.end``). The call in flight raises the first
cause: WorkerDied with the exit status and the last lines of the log of a rank that died, WorkerError for an exception,
CallTimeout or ConnectionLost. Later calls raise GroupBroken with this cause, until ``restart`` starts other processes.

One thread watches the group, whether a call waits or not, and finds the first cause; the threads of the program only
wait for answers. It sleeps until something happens: a process that this one can see ends, Ray reports the end of one,
or a connection is lost. Once a second it looks whether a call is late, and what its ranks do.

The states of a group are in ``process_handles``; those of a call and of a connection, and what follows them:

| of | state | next |
|---|---|---|
| a call | sent | running with the first answer; failed; cancelled |
| | running | answered with the last one; failed; cancelled |
| a connection | established | lost |
| | lost | restored; after ``RECONNECT_SECONDS`` the group breaks |
| | restored | established, when the calls without an answer were sent again; lost |
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import os
import select
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

from ray.exceptions import GetTimeoutError
from typing_extensions import Buffer

from mcontroller.channel.controller import RECONNECT_SECONDS, CallOrder, Hub, ask, notify, notify_from_finalizer
from mcontroller.channel.wire import Place, unpack_answer
from mcontroller.errors import CallRejected, CallTimeout, ConnectionLost, GroupError, ResourceError
from mcontroller.ray.calls.failures import NO_CALL, RankFailure, RankLabel, first_cause
from mcontroller.ray.calls.hangs import look_at_ranks, stopped_ranks
from mcontroller.ray.process_handles import GroupState, ProcessHandles
from mcontroller.ray.values.handles import ArgumentFailed, ArgumentLost, KeptValues, RemoteValue, ValuesLate, fetch
from mcontroller.ray.values.wire import decode
from mcontroller.transport import rejection

QUERY_SECONDS = 5.0
"""Timeout of out-of-band queries."""

DRAIN_SECONDS = 0.25
"""Time to wait for failures that come together with the first one, so that they are counted with it."""

CAUSE_SECONDS = 2.0
"""Time to wait for the cause, if all known failures are consequences of another."""

LOST_SECONDS = 0.02
"""Time between two looks while a connection is lost, or a call was rejected by some of its ranks."""

AGAIN_SECONDS = 5.0
"""Time after which ranks that wait are looked at again, to see whether they still wait for the same."""

FAIL_LOOKS = 10
"""A call fails after so many times ``report_after``, if stuck calls fail."""

PLACE_SECONDS = 0.5
"""Time between two looks whether rank 0, which was asked for a place, still exists."""

IDLE_SECONDS = 1.0
"""Time after which the watch looks again whether a call is late, and whether its group still exists."""

VALUES_LATE = "has ended, but its values did not arrive in"

_logger = logging.getLogger(__name__)


# ---- a call ---------------------------------------------------------------------------------------------------------


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
    """A call that was sent to its ranks, until its caller has read the values; see ``InFlightCall``.

    Args:
        group: the processes that run it.
        number: number of the call at this controller.
        role: the role that is called.
        method: name of the method.
        ranks: the ranks that run it.
        returning: the ranks whose values come back, in the order of the results.
        timeout: deadline in seconds from now; None for no deadline.
        keep: whether the values stay in the processes until they are read.

    Attributes:
        started: when the call was made, by ``time.monotonic``.
        pending: the ranks that have not answered.
        failing: whether a rank has answered with an error that ends the group, whose first cause is looked for.
        sent: the message to each rank that it was sent to, until all have answered.
        held: what must exist until all have answered: the handles and references in its arguments.
        rejections: the errors of the ranks that have rejected it before they changed anything, by rank.
        rejected_since: when the first rank rejected it, by ``time.monotonic``.
        cancelled: whether its caller has cancelled it.
        error: what every read of the result raises.
    """

    def __init__(
        self,
        group: GroupProcesses,
        number: int,
        role: str,
        method: str,
        ranks: tuple[int, ...],
        returning: Sequence[int],
        timeout: float | None,
        keep: bool,
    ) -> None:
        self.group, self.number = group, number
        self.role, self.method, self.ranks, self.timeout = role, method, ranks, timeout
        self.returning, self.keep = returning, keep
        self.started = time.monotonic()
        self.pending = set(ranks)
        self.failing = False
        self.sent: dict[int, list[bytes]] = {}
        self.held: list[Any] = []
        self.rejections: dict[int, CallRejected] = {}
        self.rejected_since = 0.0
        self.cancelled = False
        self.error: GroupError | None = None
        self._handles, self._caller = group.handles, group.hub.name
        self._returned = frozenset(returning)
        self._answers: dict[int, tuple[Buffer, Sequence[Buffer]]] = {}
        self._stored: list[int] = []
        self._values: list[Any] | None = None
        self._kept = self._keep_values() if keep else None

    @property
    def state(self) -> CallState:
        """The state of the call."""
        if self.cancelled:
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

    def check(self, timeout: float | None = None) -> None:
        """Wait for every rank and raise the error of the call, if it failed.

        Raises:
            CallRejected: the method raised on every rank before it changed anything. The group is usable.
            GroupError: any other error of a group, see ``mcontroller.errors``.
        """
        if not self.wait(timeout):
            self.end_late(timeout)
        if self.error is not None:
            raise self.error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every rank has answered or failed; return whether that happened in time."""
        ended = self.is_complete() or self._handles.ended
        if not ended and not self.group.hub.wait(self.is_complete, self.remaining(timeout)):
            if self.remaining() != 0.0:
                return False
            self.end_late(None)
        if not self.is_complete():  # the group has ended
            self.error = self.lost_with_group()
        return True

    def done(self) -> bool:
        """Whether every rank has answered or failed. Does not wait for ranks."""
        return self.wait(0.0)

    def is_complete(self) -> bool:
        """Whether the call has an error, or an answer of every rank."""
        return self.error is not None or not (self.pending or self.failing)

    def end_late(self, timeout: float | None) -> None:
        """End the group because the call is late, after ``timeout`` seconds; None for its deadline."""
        limit = min(limit for limit in (self.timeout, timeout) if limit is not None)
        late = sorted(self.pending)
        self.error = self.group.time_out(self.role, self.method, self.ranks, late, limit, "had no answer in")

    def lost_with_group(self) -> GroupError:
        """Return the reason why the call cannot be completed, or its values be read, after the end of the group."""
        handles = self._handles
        self.group.await_end()
        if handles.cause is None:
            text = f"group {self.role} was shut down before {self.method} was complete, or before its result was read"
            return GroupError(text, role=self.role)
        return handles.broken_error(self.role) if self.is_complete() else handles.cause

    def add(self, rank: int, data: Buffer, frames: Sequence[Buffer], stored: bool) -> None:
        """Keep the answer of a rank until it is read; if it is in the object store, until it is released there."""
        if not self.keep and rank in self._returned:
            self._answers[rank] = data, frames
            if stored:
                self._stored.append(rank)
                self._kept = self._kept or self._keep_values()

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for every rank and return the values; see ``InFlightCall.result``."""
        limit, began = self.timeout if timeout is None else timeout, time.monotonic()
        self.check(timeout)
        answers, _kept = self._answers, self._kept  # as long as they are read: another thread may be faster
        if self._values is None:
            if self.keep and self._handles.ended:
                raise self.lost_with_group()
            try:
                left = None if limit is None else max(0.0, began + limit - time.monotonic())
                self._values = self._read(answers, left)
            except ValuesLate as late:
                ids = self._handles.actor_ids
                ranks = [ids.index(handle.actor) for handle in late.handles] or self.ranks
                self.error = self.group.time_out(self.role, self.method, ranks, ranks, limit or 0.0, VALUES_LATE)
                raise self.error from None
            self._answers, self._kept = {}, None
        return self._values

    def _read(self, answers: Mapping[int, tuple[Buffer, Sequence[Buffer]]], timeout: float | None) -> list[Any]:
        if self.keep:
            return fetch(self.parts, timeout)
        try:
            return decode([answers[rank] for rank in self.returning], timeout)
        except GetTimeoutError:
            raise ValuesLate([self._handle(rank, outline=False) for rank in self._stored]) from None

    def cancel(self) -> None:
        """Cancel the call on all ranks if none has started it; otherwise all run it, and the values are dropped."""
        if self._values is not None or self.error is not None:
            return
        self.cancelled = self.state is not CallState.ANSWERED
        self.error = GroupError(f"{self.role}.{self.method} was cancelled", role=self.role, method=self.method)
        if self._handles.ended:
            return
        addresses = [self._handles.infos[rank].address for rank in self.ranks]
        on_all = False
        try:
            answers = ask(addresses, "prepare", self._caller, self.number, timeout=QUERY_SECONDS)
            on_all = all(answer is not None and answer[0] for answer in answers)
        finally:  # a rank that prepared and gets no decision would wait forever
            notify(addresses, "commit", self._caller, self.number, on_all)

    def read_before_end(self, timeout: float | None) -> None:
        """Read values that the processes keep, because they are about to be ended; at most for these seconds."""
        if self.keep and self._values is None and self.state is CallState.ANSWERED:
            # the reader gets the reason why the group ended
            with contextlib.suppress(ValuesLate, GroupError, ArgumentFailed):
                self._values = fetch(self.parts, timeout)

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

    def _handle(self, rank: int, *, outline: bool) -> RemoteValue:
        address, actor = self._handles.infos[rank].address, self._handles.actors[rank]._actor_id.hex()
        return RemoteValue(address, actor, self._caller, self.number, outline, self._kept)

    def _keep_values(self) -> KeptValues:
        return KeptValues(partial(_release, self._handles, tuple(self.returning), self._caller, self.number))


def _release(handles: ProcessHandles, ranks: Sequence[int], caller: bytes, number: int) -> None:
    """Release the result of a call on ranks, unless their processes have been ended, or this is a fork."""
    if not handles.ended:
        notify_from_finalizer([handles.infos[rank].address for rank in ranks], "release", caller, number)


# ---- the group ------------------------------------------------------------------------------------------------------


class Connection(enum.Enum):
    """The state of the connection to a rank; one that is not known to have changed is established."""

    LOST = "lost"
    RESTORED = "restored"
    """It is established again, and what it may have lost was not sent again yet."""


class GroupProcesses:
    """The processes of a group, which the executors of all its roles send their calls to, and what goes wrong there.

    The watch's threads do not keep it from being garbage-collected, which ends the processes.

    Args:
        name: name of the group.
        handles: the processes; their state and the first cause are kept there.
        detached: whether the processes outlive this driver.

    Attributes:
        hub: the connections to the processes; its name identifies this controller in the calls that it sends.
        executors: the executors of its roles.
        launch_again: starts such processes once more, but not on nodes with these ids; None if another driver has
            started them.
        sending: held while a call is sent, so that all ranks get the calls of several threads in one order.
        restarting: held while the processes are replaced: two roles of them may be restarted at once.
        numbers: the numbers of calls.
        order: assigns the places of calls, if this controller is the only one.
        coordinates: index on each axis, by role and rank, as far as known.
        report_after: ``ChannelOptions.report_after``, which a program may change between calls.
        fail_stuck: whether such a call fails, as after a deadline, if its ranks still wait for the same twice as long
            after the report, or after ``FAIL_LOOKS`` times ``report_after`` in any case.
        calls: the calls in flight, by number.
        keeping: calls whose values the processes keep, as long as the calls exist.
        failures: the call, the rank and the error of each failure whose cause is looked for.
        earlier: the processes that these have replaced, with the failures that explain why their values are lost.
        finishing: the call of ``before_shutdown``, which fails if a rank is stopped, because nothing will wake it up.
    """

    def __init__(self, name: str, handles: ProcessHandles, *, detached: bool = False) -> None:
        self.name, self.handles, self.detached = name, handles, detached
        self.executors: weakref.WeakSet[Any] = weakref.WeakSet()
        self.launch_again: Callable[[float | None, Set[str]], GroupProcesses] | None = None
        self.sending, self.restarting = threading.RLock(), threading.Lock()
        self.numbers = itertools.count()
        self.order = CallOrder()
        self.coordinates: dict[str, Sequence[Mapping[str, int]]] = {}
        self.report_after, self.fail_stuck = handles.options.report_after, False
        self.calls: dict[int, GroupCall] = {}
        self.keeping: weakref.WeakSet[GroupCall] = weakref.WeakSet()
        self.failures: list[tuple[GroupCall | None, int, BaseException]] = []
        self.earlier: list[ProcessHandles] = []
        self.finishing: GroupCall | None = None
        self._connections: dict[int, tuple[Connection, float]] = {}  # and since when it was lost
        self._raises_cause = False  # whether the next call raises the cause, because none was in flight
        self._late = _LateCall()
        self._lock = threading.RLock()
        self._wake = _Wake()
        self._pid = os.getpid()
        itself = weakref.proxy(self)  # the hub must not keep an unused group from being garbage-collected
        self.hub = Hub(
            uuid.uuid4().hex.encode(),
            lambda rank, frames: itself._deliver(rank, frames),
            lambda rank, established: itself._connection_changed(rank, established),
        )
        handles.hub = self.hub
        if not detached:
            weakref.finalize(self, handles.end)
        self.hub.connect([info.address for info in handles.infos])
        _living.add(self)
        arguments = weakref.ref(self), self._wake, handles.watch(self._wake.set)
        threading.Thread(target=_watch, args=arguments, name=f"watch {name}", daemon=True).start()

    @property
    def state(self) -> GroupState:
        """The state of the group."""
        state = self.handles.state
        if self.handles.ended and self.handles.cause is None:  # with the Ray cluster
            return GroupState.ENDED
        return GroupState.BUSY if state is GroupState.READY and self.calls else state

    def check(self, role: str) -> None:
        """Raise GroupBroken if the group is broken, or its cause if that happened between calls and is not known yet.

        Raises:
            GroupError: the group was shut down.
        """
        if self.handles.cause is not None:
            self.await_end()
            if self._raises_cause:
                self._raises_cause = False
                raise self.handles.cause
            raise self.handles.broken_error(role)
        if self.handles.ended:
            if os.getpid() != self._pid:
                raise GroupError(f"group {role} cannot be called in a fork: call it in process {self._pid}", role=role)
            by = "" if self.handles.reachable else ", together with the Ray cluster that it ran on"
            raise GroupError(f"group {role} has been shut down{by}: start it again to call it", role=role)

    # ---- what happens to calls and connections: reported by the hub, whose lock is held -----------------------------

    def _deliver(self, rank: int, frames: list[Any]) -> None:
        """Add the answer of a rank to its call; the hub's lock is held."""
        number, error, stored, data = unpack_answer(frames[0])
        call = self.calls.get(number)
        if call is None or rank not in call.pending:  # the answer was sent again
            return
        if error is None:
            call.add(rank, data, frames[1:], stored)
        elif isinstance(error, CallRejected) and (error.role, error.method) == (call.role, call.method):
            self._rejected(call, rank, error)
        else:
            self._failed(call, rank, error)
        self._answered(call, rank)

    def _answered(self, call: GroupCall, rank: int) -> None:
        """Note that a rank has answered a call."""
        if len(call.pending) == 1:  # the last: before it is no longer pending, because an interrupt may come here
            if len(call.rejections) == len(call.ranks):
                call.error = call.error or rejection(call.role, call.method, call.rejections)
            elif call.rejections:
                self._fail_rejected(call)
        call.pending.discard(rank)
        if not call.pending:
            self._forget(call)

    def _rejected(self, call: GroupCall, rank: int, error: CallRejected) -> None:
        """Note that a rank has rejected a call, which fails unless the others do so too."""
        call.rejected_since = call.rejected_since or time.monotonic()
        call.rejections[rank] = error
        self._wake.set()

    def _failed(self, call: GroupCall | None, rank: int, error: BaseException) -> None:
        """Note the failure of a rank, whose cause the watch finds."""
        if call is not None:
            call.failing = True
        self.failures.append((call, rank, error))
        self._wake.set()

    def _connection_changed(self, rank: int, established: bool) -> None:
        """Note that a connection was lost or is established."""
        state, since = self._connections.get(rank, (None, 0.0))
        if established and state is not None:
            self._connections[rank] = Connection.RESTORED, since
        elif not established and state is not Connection.LOST:
            self._connections[rank] = Connection.LOST, time.monotonic()
        if not established:
            for call in tuple(self.calls.values()):
                if not call.pending:  # an interrupt came before this, and had the hub connect again
                    self._forget(call)
        self._wake.set()

    def _forget(self, call: GroupCall) -> None:
        """Drop what a complete call does not need any more."""
        call.sent.clear()
        call.held.clear()
        if not call.failing:
            self.calls.pop(call.number, None)

    def _fail_rejected(self, call: GroupCall) -> None:
        """Count the rejections of a call as failures, because other ranks have not rejected it."""
        for rank, error in call.rejections.items():
            self._failed(call, rank, error)
        call.rejections = {}

    def _sent_again(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield what restored connections may have lost; the hub's lock is held."""
        for rank, (state, _) in tuple(self._connections.items()):
            if state is Connection.RESTORED:
                del self._connections[rank]
                for call in tuple(self.calls.values()):
                    if rank in call.pending and rank in call.sent:
                        yield rank, call.sent[rank]

    def _lost_since(self) -> dict[int, float]:
        """Return when each connection that is lost was lost, by rank."""
        connections = tuple(self._connections.items())
        return {rank: since for rank, (state, since) in connections if state is not Connection.RESTORED}

    # ---- failures: noticed by the watch, or by a deadline ------------------------------------------------------------

    def look(self) -> tuple[float, int] | None:
        """Find out what has happened.

        Returns:
            The seconds until the next look and the descriptor of the events of connections; None if the group ended.
        """
        try:
            with self._lock:
                if not self.handles.ended:
                    self._look_for_failures()
            self._look_for_late_call()
        except Exception as error:  # without the watch, calls would wait forever
            text = f"the watch of group {self.name} failed: {type(error).__name__}: {error}"
            _logger.exception("%s", text)
            self.break_group(lambda: GroupError(text, role=self.name))
        if self.handles.ended:
            self.hub.close()
            return None
        soon = self._connections or any(call.rejections for call in tuple(self.calls.values()))
        return LOST_SECONDS if soon else IDLE_SECONDS, self.hub.events_descriptor

    def _look_for_failures(self) -> None:
        self.hub.wait(lambda: True, 0)  # receive what has arrived
        self._look_for_deaths()
        for call in tuple(self.calls.values()):
            if self._are_rejections_late(call):
                self._fail_rejected(call)
        while self.failures and not self.handles.ended:
            self._find_cause()

    def _are_rejections_late(self, call: GroupCall) -> bool:
        """Return whether ranks that run a call have not rejected it for longer than ranks that agree need."""
        if not call.rejections or time.monotonic() - call.rejected_since < CAUSE_SECONDS:
            return False
        earlier = [other.pending for other in tuple(self.calls.values()) if other.number < call.number]
        return not any(call.pending & pending for pending in earlier)

    def _look_for_deaths(self) -> None:
        """Note processes that have ended or cannot be reached; send calls again after a lost connection."""
        lost = self._lost_since()
        if len(lost) < len(self._connections):
            self.hub.send(self._sent_again())
        deaths = self.handles.deaths(tuple(lost))
        for rank, since in lost.items():
            if rank not in deaths and time.monotonic() - since > RECONNECT_SECONDS:
                deaths[rank] = self._connection_lost(rank)
        known = {rank for _, rank, _ in self.failures}
        for rank in deaths.keys() - known:
            self._failed(self._first_call(rank), rank, deaths[rank])

    def _first_call(self, rank: int) -> GroupCall | None:
        """Return the call that a rank is running, if it has one."""
        return next((call for call in tuple(self.calls.values()) if rank in call.pending), None)

    def _connection_lost(self, rank: int) -> ConnectionLost:
        call, info = self._first_call(rank), self.handles.infos[rank]
        role, method = (call.role, call.method) if call else (self.name, NO_CALL)
        return ConnectionLost(
            f"{self._label(role, rank)} cannot be reached since {RECONNECT_SECONDS:g} s in {method}, although Ray "
            f"reports its process alive: check that this node can connect to {info.address.calls}",
            role=role,
            rank=rank,
            node=info.node,
            pid=info.pid,
            method=method,
        )

    def _look_for_late_call(self) -> None:
        """Report who waits for whom in a call that is late, or end the group."""
        call = next(iter(tuple(self.calls.values())), None)
        if call is not None and call.pending and not self.handles.ended and self._late.look(call):
            call.end_late(time.monotonic() - call.started)
        call = self.finishing
        if call is not None and not self.handles.ended:
            stopped = sorted(stopped_ranks(self.handles.infos, QUERY_SECONDS))
            if stopped and not self.handles.ended:  # also one that has finished, and keeps values that are being read
                self.time_out(call.role, call.method, call.ranks, stopped, QUERY_SECONDS, "had no answer in")

    def time_out(
        self, role: str, method: str, called: Sequence[int], late: Sequence[int], seconds: float, what: str
    ) -> GroupError:
        """Break the group because of a call that is late, and return the error.

        Args:
            role: the role that was called.
            method: name of the method.
            called: the ranks that the call was sent to.
            late: the called ranks that are late.
            seconds: the seconds that have passed.
            what: what the call lacks, such as ``had no answer in``.
        """
        return self.break_group(lambda: self._late_error(role, method, called, late, seconds, what))

    def _late_error(
        self, role: str, method: str, called: Sequence[int], late: Sequence[int], seconds: float, what: str
    ) -> CallTimeout:
        """Return the error of a late call, with the stacks of the late ranks and who waits for whom."""
        hang = look_at_ranks(self.handles.infos, self.coordinates.get(role, ()), called, late, QUERY_SECONDS)
        cause = f" {hang.cause}" if hang.cause else ""
        report = f"\n{hang.report}\n\n" if hang.report else ""
        stacks = "\n".join(f"{self._label(role, rank)}:\n{hang.stacks[rank]}" for rank in late)
        ranks = f"{len(late)} of {len(called)} ranks, {', '.join(map(str, late))}"
        return CallTimeout(
            f"{role}.{method} {what} {seconds:g} s from {ranks}:{cause}\n{report}{stacks}",
            role=role,
            method=method,
            timeout=seconds,
            ranks=tuple(late),
            stacks=hang.stacks,
            cause=hang.cause,
            report=hang.report,
        )

    # ---- the first cause ---------------------------------------------------------------------------------------------

    def _find_cause(self) -> None:
        """Break the group by the first cause of the failures, or fail a call whose arguments were never produced."""
        failures = self._drain()
        for call in {failure.call for failure in failures if failure.call is not None}:
            of_call = [failure for failure in failures if failure.call is call]
            if len(of_call) == len(call.ranks) and all(failure.upstream for failure in of_call):  # none has started it
                call.error = _cause_of(of_call)
                self.calls.pop(call.number, None)
                for entry in [entry for entry in self.failures if entry[0] is call]:
                    self.failures.remove(entry)  # in place: another thread may add one
                failures = [failure for failure in failures if failure.call is not call]
        if failures:
            between_calls = all(failure.call is None for failure in failures)
            self.break_group(lambda: _cause_of(failures), between_calls=between_calls)
        self.hub.wake()

    def break_group(self, find: Callable[[], GroupError], *, between_calls: bool = False) -> GroupError:
        """End the processes because of a failure, and return it; or the cause of an earlier end.

        Args:
            find: returns the failure; called unless there is one already.
            between_calls: whether it has happened without a call that raises it.
        """
        with self._lock:
            known = self.handles.cause
            cause = known or find()
            if known is None:
                if self.handles.ended:  # by another thread meanwhile: nothing is left to be broken
                    return cause
                self._raises_cause = between_calls and not self.calls
                self.handles.enter(GroupState.BROKEN, cause)
                if self._raises_cause:
                    _logger.warning("%s", str(cause).partition("\n")[0])
            if not self.handles.killed:
                self.handles.end()
            return cause

    def await_end(self) -> None:
        """Wait for another thread that ends the processes because of a failure: then their slots are free."""
        with self._lock:
            pass

    def error_for(self, actor: str) -> GroupError | None:
        """Return the error that ended the process with Ray's id ``actor``; None for a process of another group."""
        for replaced in self.earlier:
            if actor in replaced.actor_ids:
                return replaced.cause
        if actor not in self.handles.actor_ids or not self.handles.reachable:
            return None
        if self.handles.cause is None and not self.handles.ended:
            self.break_group(lambda: _cause_of(self._drain()))
        return self.handles.cause

    def _drain(self) -> list[RankFailure]:
        """Return the failures known so far, and those that come with them, up to the cause that they follow from."""
        end = time.monotonic() + CAUSE_SECONDS
        failures = self._more_failures()
        while _is_incomplete(failures) and time.monotonic() < end:
            failures = self._more_failures()
        return failures

    def _more_failures(self) -> list[RankFailure]:
        """Return the first failure of each rank, after waiting for more of them."""
        failed = [call for call in {id(call): call for call, _, _ in self.failures}.values() if call is not None]
        failing = {rank for _, rank, _ in self.failures}
        lost = [since for rank, since in self._lost_since().items() if rank in failing]
        began = min(lost, default=time.monotonic())
        left = max(DRAIN_SECONDS / 2, DRAIN_SECONDS + began - time.monotonic())  # Ray's cause comes after the loss
        self.hub.wait(lambda: bool(failed) and all(call.pending <= failing for call in failed), left)
        self._look_for_deaths()
        by_rank: dict[int, RankFailure] = {}
        for call, rank, error in self.failures:
            role, method = (call.role, call.method) if call else (self.name, NO_CALL)
            by_rank.setdefault(rank, RankFailure(self._label(role, rank), method, error, call))
        return list(by_rank.values())

    def _label(self, role: str, rank: int) -> RankLabel:
        coordinates = self.coordinates.get(role)
        return RankLabel(role, rank, coordinates[rank] if coordinates else {}, self.handles.infos[rank])

    # ---- for executors -----------------------------------------------------------------------------------------------

    def places(self, call: GroupCall) -> list[Place | None]:
        """Return the call that each rank of a call runs before it, which rank 0 knows.

        Raises:
            CallTimeout: rank 0 has not answered before the deadline of the call.
        """
        first = [self.handles.infos[0].address]
        while not self.handles.ended:
            left = call.remaining(PLACE_SECONDS)
            [answer] = ask(first, "place", self.hub.name, call.number, call.ranks, timeout=left)
            if answer is not None:
                places: list[Place | None] = answer[0]
                return places
            if call.timeout is not None and call.remaining() == 0.0:
                what = "got no place in the order of calls in"
                raise self.time_out(call.role, call.method, (0,), (0,), call.timeout, what)
            time.sleep(LOST_SECONDS)  # the connection may be lost
        return [None] * len(call.ranks)  # nothing is sent any more

    def is_idle(self, timeout: float | None) -> bool:
        """Return whether no call runs, of this controller or another, on a group that works."""
        if not self.handles.ended:
            self.hub.wait(lambda: True, 0)  # receive what has arrived
            with self._lock:
                self._look_for_deaths()
        if self.state is not GroupState.READY or self.failures:
            return False
        if not self.detached:
            return True
        limit = QUERY_SECONDS if timeout is None else min(QUERY_SECONDS, timeout)
        answers = ask([info.address for info in self.handles.infos], "idle", timeout=limit)
        return all(answer is not None and answer[0] for answer in answers)

    def values_late(self, late: ValuesLate, timeout: float) -> GroupError:
        """End the group whose processes did not send values of a finished call in time; return its error."""
        actors = {handle.actor for handle in late.handles}
        group = next((group for group in [self, *_living] if actors & set(group.handles.actor_ids)), self)
        ranks = [rank for rank, actor in enumerate(group.handles.actor_ids) if actor in actors]
        numbers = {handle.number for handle in late.handles}
        known = next((call for call in tuple(group.keeping) if call.number in numbers), None)
        role, method = (known.role, known.method) if known else (group.name, "an earlier call")
        return group.time_out(role, method, ranks, ranks, timeout, VALUES_LATE)

    def restart(self, timeout: float | None) -> None:
        """End these processes, and have others of the same roles run the calls from now on.

        Raises:
            ResourceError: another driver has started these processes, or there is no slot.
        """
        if self.launch_again is None:
            raise ResourceError(
                f"group {self.name} was started by another driver, which alone can restart it: restart it there, or "
                "shut it down and start another one",
                name=self.name,
            )
        restarted = GroupError(f"group {self.name} was restarted", role=self.name)
        cause = self.break_group(lambda: restarted)
        self.handles.end()
        self.handles.enter(GroupState.RESTARTING)
        try:
            after = self.launch_again(timeout, self.handles.gone)
        except BaseException as error:
            self.handles.enter(GroupState.BROKEN)
            if cause is restarted and isinstance(error, GroupError):  # the group worked until then
                self.handles.cause = error
            raise
        self.handles.enter(GroupState.ENDED)
        self.handles.cause, self.handles.hub = cause, None
        after.earlier = [*self.earlier, self.handles]
        after.coordinates = self.coordinates
        for executor in list(self.executors):
            executor.processes = after
            after.executors.add(executor)


_living: weakref.WeakSet[GroupProcesses] = weakref.WeakSet()


def error_of_process(actor: str) -> GroupError | None:
    """Return the error that ended the process with Ray's id ``actor``; None if no group of this driver knows it."""
    return next(filter(None, (group.error_for(actor) for group in list(_living))), None)


def _cause_of(failures: Sequence[RankFailure]) -> GroupError:
    """Return the first cause; for a lost argument, the error of the group whose process should have produced it."""
    cause = first_cause(failures)
    return (error_of_process(cause.actor) or cause) if isinstance(cause, ArgumentLost) else cause


def _is_incomplete(failures: Sequence[RankFailure]) -> bool:
    """Return whether more failures are expected: all known ones are consequences of another, and ranks are pending."""
    consequences = all(failure.follows for failure in failures) or all(failure.upstream for failure in failures)
    return consequences and (not failures or any(failure.call and failure.call.pending for failure in failures))


# ---- the watch ------------------------------------------------------------------------------------------------------


class _Wake:
    """Wakes up a thread that waits in ``poll``. Any thread may call ``set``, at any time."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def set(self) -> None:
        """Wake up the thread, now or when it waits next."""
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Forget what was set."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        os.close(self.descriptor)


def _watch(group: weakref.ref[GroupProcesses], wake: _Wake, processes: Sequence[int]) -> None:
    """Have the group look whenever something has happened, and once a second.

    Args:
        group: the processes of the group.
        wake: something has happened.
        processes: descriptors of the processes that this one can see; they are closed at the end.
    """
    try:
        while (watched := group()) is not None and (following := watched.look()) is not None:
            del watched
            seconds, connections = following
            poll = select.poll()
            for descriptor in (wake.descriptor, connections, *processes):
                poll.register(descriptor, select.POLLIN)
            poll.poll(seconds * 1e3)
            wake.clear()
    finally:
        for descriptor in processes:
            os.close(descriptor)


class _LateCall:
    """Logs who waits for whom in a call that has had no answer for long: once, and again when it is another wait.

    A wait is logged if two looks find the same: ranks of a call that makes progress wait too, but not for long. If they
    wait for the same much later, and stuck calls fail, the deadline of the call is now. If no rank waits for another,
    their stacks are logged if two looks, of which the second is much later, find the same.
    """

    def __init__(self) -> None:
        self._number = -1

    def look(self, call: GroupCall) -> bool:
        """Look at the oldest call in flight, if it is time to; return whether it is to fail because it is stuck."""
        group = call.group
        coordinates = group.coordinates.get(call.role, ())
        if call.number != self._number:
            self._number, self._looked, self._looks = call.number, call.started, 0
            self._waits = self._reported = self._stacks = ""
        now, left, every = time.monotonic(), call.remaining(), group.report_after
        if every is None or (left is not None and left < 2 * QUERY_SECONDS):  # then the deadline reports it
            return False
        is_new = self._waits not in ("", self._reported)
        due = self._looked + (AGAIN_SECONDS if is_new else every * 2**self._looks)
        if now < (min(due, call.started + FAIL_LOOKS * every) if group.fail_stuck else due):
            return False
        self._looks += not is_new  # a look takes seconds if a rank holds the interpreter: ever fewer of a long call
        late = sorted(call.pending)
        hang = look_at_ranks(group.handles.infos, coordinates, call.ranks, late, QUERY_SECONDS)
        self._looked = time.monotonic()
        stuck = hang.report != "" and hang.report == self._reported  # since a look at least twice ``every`` ago
        stacks = "" if hang.report else "\n".join(hang.stacks.values())
        found, before = (hang.report, self._waits) if hang.report else (stacks, self._stacks)
        if found and found == before != self._reported:
            self._reported = found
            who = f"{call.role}.{call.method} has no answer from {len(late)} of {len(call.ranks)} ranks"
            _logger.warning("%s after %.0f s: %s\n\n%s", who, now - call.started, hang.cause, found)
        self._waits, self._stacks = hang.report, stacks
        return group.fail_stuck and (stuck or now - call.started >= FAIL_LOOKS * every)
