"""Supervision of a group's processes: the calls in flight, the first failure, and the end.

The first failure ends every process of the group. Ranks that wait for a peer in a collective would wait forever, so
nothing more is sent to them: they are killed at once, and later calls raise GroupBroken with the first cause.

The end of a process is noticed through its connection, which the kernel closes at once, and through Ray, which has the
cause. A lost connection alone ends nothing: calls are sent again once it is restored, and each rank runs a call once.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from mcontroller.channel.hub import Hub
from mcontroller.channel.links import RECONNECT_SECONDS
from mcontroller.channel.messages import CallHeader, pack_call, unpack_answer
from mcontroller.channel.order import CallOrder, Place
from mcontroller.channel.queries import ask, notify
from mcontroller.errors import (
    CallRejected,
    ConnectionLost,
    DataError,
    GroupBroken,
    GroupError,
    ResourceError,
)
from mcontroller.ray.calls.call import GroupCall
from mcontroller.ray.calls.failures import NO_CALL, RankFailure, RankLabel, first_cause
from mcontroller.ray.calls.hangs import late_error, report_if_late
from mcontroller.ray.calls.states import GROUP_TRANSITIONS, CallState, GroupState
from mcontroller.ray.process_handles import ProcessHandles
from mcontroller.ray.values.handles import (
    ArgumentLost,
    ValuesLate,
)
from mcontroller.ray.values.wire import Encoded, encode
from mcontroller.transport import Arguments, rejection

__all__ = ["GroupProcesses", "living_groups"]

_logger = logging.getLogger(__name__)

DRAIN_SECONDS = 0.25
"""Time to wait for failures that come together with the first one, so that they are counted with it."""

CAUSE_SECONDS = 2.0
"""Time to wait for the cause, if all known failures are consequences of another."""

QUERY_SECONDS = 5.0
"""Timeout of out-of-band queries."""

WATCH_SECONDS = 0.5
"""Time between looks whether all processes exist, while a call is awaited and all connections are open."""

LOST_SECONDS = 0.02
"""Time between such questions while a connection is lost."""


class GroupProcesses:
    """The processes of the group ``name``, for every role that they run.

    Attributes:
        name: name of the group.
        handles: the processes themselves.
        detached: whether the group outlives this driver.
        coordinates: index on each axis, by role and rank, as far as known.
        caller: identifies this controller in the calls that it sends.
        cause: the first cause, if it is broken.
        keeping: calls whose values its processes keep, as long as the calls exist.
        executors: the executors of its roles, which send their calls to it.
        launch_again: starts such processes once more; None if another driver has started them.
        numbers: the numbers of the calls to come.
        sending: held while a call is sent, so that all ranks get the calls of several threads in one order.
    """

    def __init__(
        self, name: str, handles: ProcessHandles, *, detached: bool = False, state: GroupState = GroupState.READY
    ) -> None:
        self.name = name
        self.handles = handles
        self.detached = detached
        self.coordinates: dict[str, Sequence[Mapping[str, int]]] = {}
        self.caller = uuid.uuid4().hex.encode()
        self.sending = threading.RLock()
        self._calls: dict[int, GroupCall] = {}
        self.keeping: weakref.WeakSet[GroupCall] = weakref.WeakSet()
        self._errors: list[tuple[GroupCall, int, BaseException]] = []
        self._lost: dict[int, float] = {}
        self._restored: set[int] = set()
        self.cause: GroupError | None = None
        self.executors: weakref.WeakSet[Any] = weakref.WeakSet()
        self.launch_again: Callable[[float | None], GroupProcesses] | None = None
        self._earlier: dict[str, GroupError] = {}
        self._state = state
        self._lock = threading.RLock()
        self.numbers = itertools.count()
        self._order = CallOrder()
        itself = weakref.ref(self)  # the hub must not keep an unused group from being garbage-collected
        self.hub = Hub(
            self.caller,
            lambda rank, frames: _alive(itself)._deliver(rank, frames),
            lambda rank, established: _alive(itself)._connection_changed(rank, established),
        )
        self.hub.connect([info.address for info in handles.infos])
        handles.hub = self.hub
        handles.watch()
        if not detached:
            weakref.finalize(self, handles.end)
        _living.add(self)

    def restart(self, timeout: float | None) -> None:
        """End these processes, and have others of the same roles run the calls from now on.

        Raises:
            ResourceError: another driver has started these processes, they cannot be ended, or there is no slot.
        """
        if self.launch_again is None:
            raise ResourceError(
                f"group {self.name} was started by another driver, which alone can restart it: restart it there, or "
                "shut it down and start another one",
                name=self.name,
            )
        self.handles.end()
        self.handles.check_ended(self.name)
        after = self.launch_again(timeout)
        ended = self.cause or GroupError(f"group {self.name} was restarted", role=self.name)
        after._earlier = {**self._earlier, **dict.fromkeys(self.handles.actor_ids, ended)}
        after.coordinates = self.coordinates
        for executor in list(self.executors):
            executor.processes = after
            after.executors.add(executor)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.handles.infos)

    @property
    def nodes(self) -> list[str]:
        """The address of the node of every rank."""
        return [info.node for info in self.handles.infos]

    @property
    def state(self) -> GroupState:
        """The state of the group."""
        if self._state is not GroupState.BROKEN and self.handles.ended:
            return GroupState.ENDED
        return GroupState.BUSY if self._state is GroupState.READY and self._calls else self._state

    def change(self, state: GroupState) -> None:
        """Set the state; raise ValueError if it cannot follow the one before."""
        if state not in GROUP_TRANSITIONS[self.state]:
            raise ValueError(f"group {self.name} is {self.state.value}, and cannot become {state.value}")
        self._state = state

    def messages(
        self, call: GroupCall, role: str | None, method: str, arguments: Sequence[Arguments]
    ) -> Iterator[tuple[int, list[bytes]]]:
        """Return the messages of a call that is in flight from now on, for ``hub.send``; ``sending`` is held.

        Ranks with equal arguments have the same object.

        Args:
            call: the call.
            role: the role whose worker runs the method; None for a method of the process itself.
            method: name of the method.
            arguments: in the order of the ranks.
        """
        expected = frozenset(call.returning)
        encoded: dict[int, Encoded] = {}
        returning: dict[int, list[int]] = {}
        for rank, each in zip(call.ranks, arguments, strict=True):
            ranks = returning.setdefault(id(each), [])
            if rank in expected:
                ranks.append(rank)
            if id(each) not in encoded:
                value = encoded[id(each)] = encode(each, self.handles.options.inline_bytes)
                call.held.append(value.stored)
        settled = min(self._calls, default=call.number)
        only_controller = not self.detached
        places = self._order.assign(self.caller, call.number, call.ranks) if only_controller else self._places(call)
        self._calls[call.number] = call
        if call.keep:
            self.keeping.add(call)

        def packed_one_by_one() -> Iterator[tuple[int, list[bytes]]]:
            packed: dict[tuple[int, Place | None], list[bytes]] = {}
            for rank, each, after in zip(call.ranks, arguments, places, strict=True):
                key = id(each), after
                if key not in packed:
                    header = CallHeader(call.number, settled, after, role, method, returning[id(each)], call.keep)
                    packed[key] = [pack_call(header, encoded[id(each)].data), *encoded[id(each)].frames]
                call.sent[rank] = packed[key]  # to be sent again if the connection is lost
                yield rank, packed[key]

        return packed_one_by_one()

    def _places(self, call: GroupCall) -> list[Place | None]:
        """Return the call that each rank of a call runs before it; ask rank 0 again if the connection is lost.

        Raises:
            CallTimeout: rank 0 has not answered before the deadline of the call.
        """
        asked = [self.handles.infos[0].address]
        lost_since: float | None = None
        while True:
            began, left = time.monotonic(), call.remaining()
            limit = WATCH_SECONDS if left is None else min(WATCH_SECONDS, left)
            [answer] = ask(asked, "place", self.caller, call.number, call.ranks, timeout=limit)
            if answer is not None:
                places: list[Place | None] = answer[0]
                return places
            if call.remaining() == 0.0:
                order = GroupCall(call.role, call.method, (0,), timeout=call.timeout)
                raise self.time_out(order, None, "got no place in the order of calls in")
            lost_since = None if time.monotonic() - began >= limit else lost_since or began
            if self.handles.ended or 0 in self.handles.deaths(LOST_SECONDS if lost_since else 0.0):
                return [None] * len(call.ranks)  # rank 0 is gone, which ends the group
            if lost_since is not None and time.monotonic() - lost_since > RECONNECT_SECONDS:
                return [None] * len(call.ranks)

    def values_late(self, late: ValuesLate, timeout: float, call: GroupCall | None = None) -> GroupError:
        """End the group whose processes did not send values of a finished call in time; return its error.

        Args:
            late: the values.
            timeout: the seconds that were waited.
            call: the call, if it is known; else it is found by its number.
        """
        actors = {source.actor for source, _ in late.sources}
        group = next((group for group in [self, *_living] if actors & set(group.handles.actor_ids)), self)
        ranks = tuple(rank for rank, actor in enumerate(group.handles.actor_ids) if actor in actors)
        numbers = {number for _, number in late.sources}
        known = call or next((each for each in tuple(group.keeping) if each.number in numbers), None)
        role, method = (known.role, known.method) if known else (group.name, "an earlier call")
        unread = GroupCall(role, method, ranks or (known.ranks if known else ()), timeout=timeout)
        text = "has ended, but its values did not arrive in"
        return group.time_out(unread, None, text)

    def call_processes(
        self, role: str, shown: str, method: str, arguments: Sequence[Arguments], timeout: float | None = None
    ) -> GroupCall:
        """Call a method of the ``WorkerProcess`` of every rank, with its own arguments; ``shown`` is its name."""
        with self.sending:
            call = GroupCall(role, shown, tuple(range(self.world_size)), timeout=timeout, number=next(self.numbers))
            call.held = list(arguments)
            self.hub.send(self.messages(call, None, method, arguments))
        return call

    def break_while_sending(self, call: GroupCall, cause: BaseException) -> None:
        """End the group after an interrupt while a call was sent: ranks that have it would wait for the others."""
        self._break(
            lambda: GroupError(
                f"{type(cause).__name__} while {call.role}.{call.method} was being sent: {len(call.sent)} of "
                f"{len(call.ranks)} ranks are known to have it",
                role=call.role,
            )
        )

    def check(self, role: str) -> None:
        """Raise GroupBroken if an earlier call has failed, read or not; WorkerDied if a process ended between calls."""
        ended = self.handles.ended
        if not ended and self._poll():
            cause = self._break(lambda: self._cause_of(self._drain()))
            if all(call.method == NO_CALL for call, _, _ in self._errors):
                raise cause
        if self.cause is not None:
            self._raise_broken(role)
        if ended:
            by = "" if self.handles.reachable else ", together with the Ray cluster that it ran on"
            raise GroupError(f"group {role} has been shut down{by}: start it again to call it", role=role)

    def settle(self, call: GroupCall, timeout: float | None = None) -> None:
        """Wait until all ranks of a call have answered.

        Raises:
            CallRejected: the method raised on every rank before it changed anything. The group is usable.
            WorkerError: the method raised on a rank of this call, which is the first cause.
            WorkerDied: the process of a rank ended.
            ConnectionLost: a process cannot be reached any more, although it exists.
            CallTimeout: the deadline passed.
            GroupBroken: another call failed first.
        """
        if call.error is not None:
            raise call.error
        if self.handles.ended and (call.pending or call.state is CallState.FAILED):
            self.raise_ended(call)
        try:
            if not self._await(call, call.remaining(timeout)):
                raise self.time_out(call, timeout)
        except _Failed:
            if self.state is GroupState.ENDED:  # shut down by another thread meanwhile
                self.raise_ended(call)
            raise self._failure_of(call) from None
        if call.error is not None:  # every rank has rejected it
            raise call.error

    def wait(self, call: GroupCall, timeout: float | None = None) -> bool:
        """Return whether all ranks of a call have answered or failed within ``timeout`` seconds.

        Does not raise: ``settle`` then raises what it would have raised without the wait.
        """
        if self.handles.ended or call.error is not None:
            return True
        try:
            if not self._await(call, call.remaining(timeout)):
                if call.remaining() != 0.0:
                    return False
                call.error = self.time_out(call, None)
        except _Failed:
            if self.state is not GroupState.ENDED:  # not shut down by another thread meanwhile
                call.error = self._failure_of(call)
        return True

    def cancel(self, call: GroupCall) -> bool:
        """Cancel a call on all ranks if none has started it; return whether it was cancelled. See ``Cancellation``."""
        if self.handles.ended:
            return False
        addresses = [self.handles.infos[rank].address for rank in call.ranks]
        cancelled = False
        try:
            answers = ask(addresses, "prepare", self.caller, call.number, timeout=QUERY_SECONDS)
            cancelled = all(answer is not None and answer[0] for answer in answers)
        finally:  # a rank that prepared and gets no decision would wait forever
            notify(addresses, "commit", self.caller, call.number, cancelled)
        return cancelled

    def is_idle(self, timeout: float | None) -> bool:
        """Return whether no call runs, of this controller or another, on a group that works."""
        if self.handles.ended or self._poll() or self.state is not GroupState.READY:
            return False
        if not self.detached:
            return True
        limit = QUERY_SECONDS if timeout is None else min(QUERY_SECONDS, timeout)
        answers = ask([info.address for info in self.handles.infos], "idle", timeout=limit)
        return all(answer is not None and answer[0] for answer in answers)

    def time_out(self, call: GroupCall, timeout: float | None, what: str = "had no answer in") -> GroupError:
        """Break the group because of a call that is late, and return the error."""
        coordinates = self.coordinates.get(call.role, ())
        return self._break(partial(late_error, call, timeout, what, self.handles.infos, coordinates, QUERY_SECONDS))

    # ---- waiting: the hub calls the first two with its lock held -----------------------------------------------------

    def _deliver(self, rank: int, frames: list[Any]) -> None:
        try:
            number, error, stored, data = unpack_answer(frames[0])
        except DataError as malformed:
            _logger.warning("dropped a message of rank %d: %s", rank, malformed)
            return
        call = self._calls.get(number)
        if call is None or rank not in call.pending:  # the answer was sent again
            return
        if call.state is CallState.SENT:
            call.change(CallState.RUNNING)
        if error is None:
            call.take(rank, data, frames[1:], stored)
        elif isinstance(error, CallRejected) and (error.role, error.method) == (call.role, call.method):
            call.rejected_since = call.rejected_since or time.monotonic()
            call.rejections[rank] = error
        else:
            self._errors.append((call, rank, error))
            if call.state is not CallState.FAILED:
                call.change(CallState.FAILED)
        if call.pending == {rank}:  # the last: before it is no longer pending, because an interrupt may come here
            if len(call.rejections) == len(call.ranks):
                call.error = call.error or rejection(call.role, call.method, call.rejections)
            elif call.rejections:
                self._fail_rejected(call)
        call.pending.discard(rank)
        if not call.pending:
            self._forget(call)

    def _forget(self, call: GroupCall) -> None:
        """Drop what a complete call does not need any more."""
        call.sent.clear()
        call.held.clear()
        if call.state is CallState.RUNNING:
            call.change(CallState.FAILED if call.rejections else CallState.ANSWERED)
        if call.state is not CallState.FAILED or call.rejections:
            self._calls.pop(call.number, None)

    def _fail_rejected(self, call: GroupCall) -> None:
        """Count the rejections of a call as failures, because other ranks have not rejected it."""
        self._errors += [(call, rank, error) for rank, error in call.rejections.items()]
        call.rejections = {}
        if call.state is not CallState.FAILED:
            call.change(CallState.FAILED)

    def _are_rejections_late(self, call: GroupCall) -> bool:
        """Return whether ranks that run a call have not rejected it for longer than ranks that agree need."""
        if not call.rejections or time.monotonic() - call.rejected_since < CAUSE_SECONDS:
            return False
        earlier = [other.pending for other in tuple(self._calls.values()) if other.number < call.number]
        return not any(call.pending & pending for pending in earlier)

    def _connection_changed(self, rank: int, established: bool) -> None:
        if established:
            if rank in self._lost:
                self._restored.add(rank)
                del self._lost[rank]
            return
        self._lost.setdefault(rank, time.monotonic())
        for call in tuple(self._calls.values()):
            if not call.pending:  # an interrupt came before this, and had the hub connect again
                self._forget(call)

    def _await(self, call: GroupCall, seconds: float | None) -> bool:
        """Wait for one call; raise ``_Failed`` as soon as any call of the group has failed."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            pause = LOST_SECONDS if self._lost else WATCH_SECONDS
            left = pause if end is None else min(pause, max(0.0, end - time.monotonic()))
            self.hub.wait(partial(self._has_news, call, len(self._lost)), left)
            if not call.pending and (call.state is not CallState.FAILED or call.error is not None):
                return True
            if self._are_rejections_late(call):
                self._fail_rejected(call)
            if self._errors or self.hub.closed or self.handles.ended or self._look_for_deaths():
                raise _Failed
            if end is not None and time.monotonic() >= end:
                return False
            options, coordinates = self.handles.options, self.coordinates.get(call.role, ())
            report_if_late(call, self.handles.infos, coordinates, options, QUERY_SECONDS)
            if call.remaining() == 0.0:
                return False

    def _has_news(self, call: GroupCall, lost: int) -> bool:
        return bool(not call.pending or self._errors or self._restored) or len(self._lost) != lost

    def _poll(self) -> bool:
        """Receive what has arrived, and return whether a call has failed or a process has died."""
        self.hub.wait(lambda: True, 0)
        return bool(self._errors) or (bool(self._lost or self._restored) and self._look_for_deaths())

    def _look_for_deaths(self) -> bool:
        """Return whether a process has died or cannot be reached; send calls again after a lost connection."""
        for rank in tuple(self._restored):
            calls = [call for call in tuple(self._calls.values()) if rank in call.pending and rank in call.sent]
            self._restored.discard(rank)  # an interrupt while the calls are sent has all connections made again
            self.hub.send([(rank, call.sent[rank]) for call in calls])
        found = self.handles.deaths()
        for rank, since in tuple(self._lost.items()):
            if rank not in found and time.monotonic() - since > RECONNECT_SECONDS:
                found[rank] = self._connection_lost(rank)
        known = {rank for _, rank, _ in self._errors}
        self._errors += [(self._first_call(rank), rank, error) for rank, error in found.items() if rank not in known]
        return bool(found)

    def _first_call(self, rank: int) -> GroupCall:
        """Return the call that a rank is running, or a stand-in if it has none."""
        calls = (call for call in tuple(self._calls.values()) if rank in call.pending)
        return next(calls, None) or GroupCall(self.name, NO_CALL, (rank,))

    def _connection_lost(self, rank: int) -> ConnectionLost:
        call, info = self._first_call(rank), self.handles.infos[rank]
        label = self._label(call.role, rank)
        return ConnectionLost(
            f"{label} cannot be reached since {RECONNECT_SECONDS:g} s in {call.method}, although Ray reports its "
            f"process alive: check that this node can connect to {info.address.calls}",
            role=call.role,
            rank=rank,
            node=info.node,
            pid=info.pid,
            method=call.method,
        )

    def raise_ended(self, call: GroupCall) -> NoReturn:
        """Raise the reason why the values of a call cannot be read: the group is broken or was shut down."""
        if self.cause is not None:
            self._raise_broken(call.role)
        raise GroupError(
            f"group {call.role} was shut down before {call.method} was complete, or before its result was read",
            role=call.role,
        )

    # ---- the first failure -------------------------------------------------------------------------------------------

    def _raise_broken(self, role: str) -> NoReturn:
        raise GroupBroken(
            f"group {role} is broken and its processes are stopped; first cause: {self.cause}",
            role=role,
            first_cause=self.cause,
        ) from self.cause

    def _failure_of(self, call: GroupCall) -> GroupError:
        failures = self._drain()
        own = [failure for failure in failures if failure.call is call]
        if len(own) == len(call.ranks) and all(failure.upstream for failure in own):
            self._calls.pop(call.number, None)  # no rank has started: its arguments were never produced
            self._errors = [entry for entry in self._errors if entry[0] is not call]
            return self._cause_of(own)
        return self._break(lambda: self._cause_of(failures))

    def _break(self, make: Callable[[], GroupError]) -> GroupError:
        with self._lock:
            if self.cause is None:
                cause = make()
                if self.state is GroupState.ENDED:  # by another thread meanwhile: nothing is left to be broken
                    return cause
                self.change(GroupState.BROKEN)
                self.cause = cause
            self._calls.clear()
            if not self.handles.killed:
                self.handles.end()
            return self.cause

    def _cause_of(self, failures: Sequence[RankFailure]) -> GroupError:
        """Return the first cause; for a lost argument, the error of the group whose process should have produced it."""
        cause = first_cause(failures)
        return (error_of_process(cause.actor) or cause) if isinstance(cause, ArgumentLost) else cause

    def error_for(self, actor: str) -> GroupError | None:
        """Return the error that ended the process with Ray's id ``actor``; None for a process of another group."""
        if actor in self._earlier:
            return self._earlier[actor]
        if actor not in self.handles.actor_ids or not self.handles.reachable:
            return None
        if self.cause is None and not self.handles.ended:
            self._break(lambda: self._cause_of(self._drain()))
        return self.cause

    def _drain(self) -> list[RankFailure]:
        """Return the failures known so far, and those that come with them, up to the cause that they follow from."""
        end = time.monotonic() + CAUSE_SECONDS
        failures = self._failures()
        while _is_incomplete(failures) and time.monotonic() < end:
            failures = self._failures()
        return failures

    def _failures(self) -> list[RankFailure]:
        """Return the first failure of each rank, after waiting for more of them."""
        failed = {call.number: call for call, _, _ in self._errors}.values()
        failing = {rank for _, rank, _ in self._errors}
        lost = [since for rank, since in tuple(self._lost.items()) if rank in failing]
        began = min(lost, default=time.monotonic())
        left = max(DRAIN_SECONDS / 2, DRAIN_SECONDS + began - time.monotonic())  # Ray's cause comes after the loss
        self.hub.wait(lambda: bool(failed) and all(call.pending <= failing for call in failed), left)
        self._look_for_deaths()
        found: dict[int, RankFailure] = {}
        for call, rank, error in self._errors:
            found.setdefault(rank, RankFailure(self._label(call.role, rank), call.method, error, call))
        return list(found.values())

    def _label(self, role: str, rank: int) -> RankLabel:
        coordinates = self.coordinates.get(role)
        return RankLabel(role, rank, coordinates[rank] if coordinates else {}, self.handles.infos[rank])


class _Failed(Exception):
    """A call of the group has failed, or its processes have been ended."""


_living: weakref.WeakSet[GroupProcesses] = weakref.WeakSet()


def error_of_process(actor: str) -> GroupError | None:
    """Return the error that ended the process with Ray's id ``actor``; None if no group of this driver knows it."""
    return next(filter(None, (group.error_for(actor) for group in list(_living))), None)


def living_groups() -> list[GroupProcesses]:
    """Return the groups of this driver that have not ended."""
    return [group for group in list(_living) if not group.handles.ended]


def _alive(reference: weakref.ref[GroupProcesses]) -> GroupProcesses:
    group = reference()
    if group is None:  # the hub is only used by methods of the group
        raise ReferenceError("the group of this hub does not exist any more")
    return group


def _is_incomplete(failures: Sequence[RankFailure]) -> bool:
    """Return whether more failures are expected: all known ones are consequences of another, and ranks are pending."""
    consequences = all(failure.follows for failure in failures) or all(failure.upstream for failure in failures)
    return consequences and (not failures or any(failure.call.pending for failure in failures))
