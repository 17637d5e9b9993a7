"""Supervision of a group's processes: the calls in flight, the first failure, and the end.

The first failure ends every process of the group. Ranks that wait for a peer in a collective would wait forever, so
nothing more is sent to them: they are killed at once, and later calls raise GroupBroken with the first cause.

The watch of the group notices its failures, whether a call waits or not, and finds the first cause. The threads of the
program only wait for answers. A lost connection alone ends nothing: calls are sent again once it is restored, and each
rank runs a call once.
"""

from __future__ import annotations

import enum
import itertools
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import ray

from mcontroller.channel.controller import RECONNECT_SECONDS, CallOrder, Hub, ask
from mcontroller.channel.wire import CallHeader, Place, pack_call, unpack_answer
from mcontroller.errors import CallRejected, ConnectionLost, DataError, GroupError, ResourceError
from mcontroller.ray.calls.call import QUERY_SECONDS, VALUES_LATE, GroupCall
from mcontroller.ray.calls.failures import NO_CALL, RankFailure, RankLabel, first_cause
from mcontroller.ray.calls.hangs import LateReports, late_error
from mcontroller.ray.calls.watch import Wake, watch_answers, watch_ends
from mcontroller.ray.process_handles import ProcessHandles
from mcontroller.ray.values.handles import ArgumentLost, StoredValue, ValuesLate
from mcontroller.ray.values.wire import Encoded, encode
from mcontroller.transport import Arguments, Deferred, rejection

_logger = logging.getLogger(__name__)

DRAIN_SECONDS = 0.25
"""Time to wait for failures that come together with the first one, so that they are counted with it."""

CAUSE_SECONDS = 2.0
"""Time to wait for the cause, if all known failures are consequences of another."""

PLACE_SECONDS = 0.5
"""Time between two looks whether rank 0, which was asked for a place, still exists."""

LOST_SECONDS = 0.02
"""Time between two looks while a connection is lost, or a call was rejected by some of its ranks."""


class GroupState(enum.Enum):
    """The state of the processes of a group."""

    READY = "ready"
    """No call of this controller is in flight."""
    BUSY = "busy"
    """Calls of this controller are in flight."""
    BROKEN = "broken"
    """The processes were ended because of a failure, which the group knows. A restart starts others."""
    ENDED = "ended"
    """The processes were ended on purpose, or the Ray cluster is gone."""


class GroupProcesses:
    """The processes of the group ``name``, for every role that they run.

    Attributes:
        name: name of the group.
        handles: the processes themselves, and the first cause if they were ended by a failure.
        detached: whether the group outlives this driver.
        coordinates: index on each axis, by role and rank, as far as known.
        hub: the connections to the processes; its name identifies this controller in the calls that it sends.
        keeping: calls whose values its processes keep, as long as the calls exist.
        executors: the executors of its roles, which send their calls to it.
        launch_again: starts such processes once more, but not on nodes with these ids; None if another driver has
            started them.
        sending: held while a call is sent, so that all ranks get the calls of several threads in one order.
    """

    def __init__(self, name: str, handles: ProcessHandles, *, detached: bool = False) -> None:
        self.name = name
        self.handles = handles
        self.detached = detached
        self.coordinates: dict[str, Sequence[Mapping[str, int]]] = {}
        self.keeping: weakref.WeakSet[GroupCall] = weakref.WeakSet()
        self.executors: weakref.WeakSet[Any] = weakref.WeakSet()
        self.launch_again: Callable[[float | None, Set[str]], GroupProcesses] | None = None
        self.sending = threading.RLock()
        self._numbers = itertools.count()
        self._order = CallOrder()
        self._calls: dict[int, GroupCall] = {}
        self._failures: list[tuple[GroupCall | None, int, BaseException]] = []
        self._lost: dict[int, float] = {}
        self._restored: set[int] = set()
        self._logged: set[int] = set()  # the ranks whose lost connection was logged
        self._unraised = False  # whether the group broke while no call was in flight: the next one raises the cause
        self._earlier: dict[str, GroupError] = {}
        self._lock = threading.RLock()
        itself = weakref.proxy(self)  # the hub must not keep an unused group from being garbage-collected
        self.hub = Hub(
            uuid.uuid4().hex.encode(),
            lambda rank, frames: itself._deliver(rank, frames),
            lambda rank, established: itself._connection_changed(rank, established),
        )
        self.hub.connect([info.address for info in handles.infos])
        handles.hub = self.hub
        if not detached:
            weakref.finalize(self, handles.end)
        _living.add(self)
        self._wake = Wake()
        self._late = LateReports(handles, QUERY_SECONDS)
        _on_thread(watch_ends, weakref.WeakMethod(self._look), self._wake, handles.watch(self._wake.set))
        late, frozen = weakref.WeakMethod(self._report_late), weakref.WeakMethod(self._frozen)
        _on_thread(watch_answers, late, frozen, handles.infos, handles.options)

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
        after = self.launch_again(timeout, self.handles.gone)
        ended = self.handles.cause or GroupError(f"group {self.name} was restarted", role=self.name)
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
        if self.handles.cause is not None:
            return GroupState.BROKEN
        if self.handles.ended:
            return GroupState.ENDED
        return GroupState.BUSY if self._calls else GroupState.READY

    # ---- calls: sent, and answered -----------------------------------------------------------------------------------

    def check(self, role: str) -> None:
        """Raise GroupBroken if the group is broken, or its cause if that happened between calls and is not known yet.

        Raises:
            GroupError: the group was shut down.
        """
        if self.handles.cause is not None:
            if self._unraised:
                self._unraised = False
                raise self.handles.cause
            raise self.handles.broken_error(role)
        if self.handles.ended:
            by = "" if self.handles.reachable else ", together with the Ray cluster that it ran on"
            raise GroupError(f"group {role} has been shut down{by}: start it again to call it", role=role)

    def send(
        self,
        role: str,
        method: str,
        arguments: Mapping[int, Arguments],
        returning: Sequence[int] = (),
        *,
        timeout: float | None = None,
        keep: bool = False,
        of_process: str | None = None,
    ) -> GroupCall:
        """Send a call to its ranks; the arguments are as in ``mcontroller.transport.Executor.submit``.

        Args:
            role: the role that is called.
            method: the name of a method of the worker.
            arguments: by rank. Ranks with equal arguments have the same object.
            returning: the ranks whose values come back, in the order of the results.
            timeout: deadline in seconds from now; None for no deadline.
            keep: whether the values stay in the processes until they are asked for.
            of_process: the method of ``WorkerProcess`` to call instead; ``method`` is then its name in messages.

        Raises:
            DataError: an argument cannot be sent.
            CallTimeout: rank 0 has not given the call a place before its deadline.
        """
        with self.sending:
            call = GroupCall(
                self.handles,
                self.hub,
                self.time_out,
                role,
                method,
                tuple(arguments),
                returning,
                timeout=timeout,
                keep=keep,
                number=next(self._numbers),
            )
            encoded: dict[int, Encoded] = {}
            for each in arguments.values():
                if id(each) not in encoded:
                    own = _with_objects(each)
                    encoded[id(each)] = stored = encode(own, self.handles.options.inline_bytes)
                    call.held.append(stored.stored)
                    values = (*own.args, *own.kwargs.values())
                    call.held += [value.handles() for value in values if isinstance(value, Deferred)]
            settled = min(self._calls, default=call.number)
            called = (None, of_process) if of_process else (role, method)
            places = self._places(call) if self.detached else []
            try:  # whoever assigns a place sends the call: the ranks wait for it before they run the next one
                places = places or self._order.assign(self.hub.name, call.number, call.ranks)
                self._calls[call.number] = call
                if keep:
                    self.keeping.add(call)
                self.hub.send(self._messages(call, settled, places, called, arguments, encoded))
            except BaseException as error:
                text = f"{type(error).__name__} while {role}.{method} was being sent: {len(call.sent)} of "
                text += f"{len(call.ranks)} ranks are known to have it"  # which would wait for the others
                self._break(lambda: GroupError(text, role=role))
                raise
        return call

    def _messages(
        self,
        call: GroupCall,
        settled: int,
        places: Sequence[Place | None],
        called: tuple[str | None, str],
        arguments: Mapping[int, Arguments],
        encoded: Mapping[int, Encoded],
    ) -> Iterator[tuple[int, list[bytes]]]:
        """Yield the message of each rank; ranks with the same arguments and place have one.

        Args:
            call: the call.
            settled: see ``CallHeader``, as the two that follow.
            places: by rank, in the order of ``arguments``.
            called: the role and the method.
            arguments: by rank.
            encoded: the serialized arguments, by their identity.
        """
        returning: dict[int, list[int]] = {}
        for rank in call.returning:
            returning.setdefault(id(arguments[rank]), []).append(rank)
        packed: dict[tuple[int, Place | None], list[bytes]] = {}
        for (rank, each), after in zip(arguments.items(), places, strict=True):
            key = id(each), after
            if key not in packed:
                header = CallHeader(call.number, settled, after, *called, returning.get(id(each), ()), call.keep)
                packed[key] = [pack_call(header, encoded[id(each)].data), *encoded[id(each)].frames]
            call.sent[rank] = packed[key]  # to be sent again if the connection is lost
            yield rank, packed[key]

    def _places(self, call: GroupCall) -> list[Place | None]:
        """Return the call that each rank of a call runs before it, which rank 0 knows.

        Raises:
            CallTimeout: rank 0 has not answered before the deadline of the call.
        """
        asked = [self.handles.infos[0].address]
        while not self.handles.ended:
            left = call.remaining(PLACE_SECONDS)
            [answer] = ask(asked, "place", self.hub.name, call.number, call.ranks, timeout=left)
            if answer is not None:
                places: list[Place | None] = answer[0]
                return places
            if call.timeout is not None and call.remaining() == 0.0:
                what = "got no place in the order of calls in"
                raise self.time_out(call.role, call.method, (0,), (0,), call.timeout, what)
            time.sleep(LOST_SECONDS)  # the connection may be lost
        return [None] * len(call.ranks)  # nothing is sent any more

    def _deliver(self, rank: int, frames: list[Any]) -> None:
        """Add the answer of a rank to its call; the hub's lock is held."""
        try:
            number, error, stored, data = unpack_answer(frames[0])
        except DataError as malformed:
            _logger.warning("dropped a message of rank %d: %s", rank, malformed)
            return
        call = self._calls.get(number)
        if call is None or rank not in call.pending:  # the answer was sent again
            return
        if error is None:
            call.add(rank, data, frames[1:], stored)
        elif isinstance(error, CallRejected) and (error.role, error.method) == (call.role, call.method):
            call.rejected_since = call.rejected_since or time.monotonic()
            call.rejections[rank] = error
            self._wake.set()
        else:
            self._fail(call, rank, error)
        if len(call.pending) == 1:  # the last: before it is no longer pending, because an interrupt may come here
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
        if not call.failing:
            self._calls.pop(call.number, None)

    def is_idle(self, timeout: float | None) -> bool:
        """Return whether no call runs, of this controller or another, on a group that works."""
        if not self.handles.ended:
            self.hub.wait(lambda: True, 0)  # receive what has arrived
        if self.state is not GroupState.READY or self._failures:
            return False
        if not self.detached:
            return True
        limit = QUERY_SECONDS if timeout is None else min(QUERY_SECONDS, timeout)
        answers = ask([info.address for info in self.handles.infos], "idle", timeout=limit)
        return all(answer is not None and answer[0] for answer in answers)

    # ---- failures: noticed by the watch, or by a deadline ------------------------------------------------------------

    def _look(self) -> tuple[float, int] | None:
        """Find out what has happened; called by the watch, see ``watch_ends``."""
        try:
            with self._lock:
                if not self.handles.ended:
                    self._look_for_failures()
        except Exception as error:  # without the watch, calls would wait forever
            text = f"the watch of group {self.name} failed: {type(error).__name__}: {error}"
            _logger.exception("%s", text)
            self._break(lambda: GroupError(text, role=self.name))
        if self.handles.ended:
            self.hub.close()
            return None
        soon = self._lost or any(call.rejections for call in tuple(self._calls.values()))
        return LOST_SECONDS if soon else float("inf"), self.hub.events_descriptor

    def _look_for_failures(self) -> None:
        self.hub.wait(lambda: True, 0)  # receive what has arrived
        self._look_for_deaths()
        for call in tuple(self._calls.values()):
            if self._are_rejections_late(call):
                self._fail_rejected(call)
        while self._failures and not self.handles.ended:
            self._find_cause()

    def _fail(self, call: GroupCall | None, rank: int, error: BaseException) -> None:
        """Note a failure, whose cause the watch finds."""
        if call is not None:
            call.failing = True
        self._failures.append((call, rank, error))
        self._wake.set()

    def _fail_rejected(self, call: GroupCall) -> None:
        """Count the rejections of a call as failures, because other ranks have not rejected it."""
        for rank, error in call.rejections.items():
            self._fail(call, rank, error)
        call.rejections = {}

    def _are_rejections_late(self, call: GroupCall) -> bool:
        """Return whether ranks that run a call have not rejected it for longer than ranks that agree need."""
        if not call.rejections or time.monotonic() - call.rejected_since < CAUSE_SECONDS:
            return False
        earlier = [other.pending for other in tuple(self._calls.values()) if other.number < call.number]
        return not any(call.pending & pending for pending in earlier)

    def _connection_changed(self, rank: int, established: bool) -> None:
        """Note that a connection was lost or is established; the hub's lock is held."""
        if not established:
            self._lost.setdefault(rank, time.monotonic())
            for call in tuple(self._calls.values()):
                if not call.pending:  # an interrupt came before this, and had the hub connect again
                    self._forget(call)
        elif self._lost.pop(rank, None) is not None:
            self._restored.add(rank)
            self._logged.discard(rank)
        self._wake.set()

    def _look_for_deaths(self) -> None:
        """Note processes that have ended or cannot be reached; send calls again after a lost connection."""
        for rank in tuple(self._restored):
            self._restored.discard(rank)
            calls = [call for call in tuple(self._calls.values()) if rank in call.pending and rank in call.sent]
            self.hub.send([(rank, call.sent[rank]) for call in calls])
        found = self.handles.deaths(tuple(self._lost))
        for rank, since in tuple(self._lost.items()):
            seconds = time.monotonic() - since
            if rank not in found and seconds > min(self.handles.options.frozen_after, RECONNECT_SECONDS):
                error = self._connection_lost(
                    rank,
                    f"cannot be reached since {min(round(seconds, 1), RECONNECT_SECONDS):g} s in {{}}, although Ray "
                    f"reports its process alive: check that this node can connect to "
                    f"{self.handles.infos[rank].address.calls}",
                )
                if seconds > RECONNECT_SECONDS:
                    found[rank] = error
                elif rank not in self._logged:
                    self._logged.add(rank)
                    _logger.warning("%s. The group ends after %g s without it", error, RECONNECT_SECONDS)
        known = {rank for _, rank, _ in self._failures}
        for rank in found.keys() - known:
            self._fail(self._first_call(rank), rank, found[rank])

    def _first_call(self, rank: int) -> GroupCall | None:
        """Return the call that a rank is running, if it has one."""
        return next((call for call in tuple(self._calls.values()) if rank in call.pending), None)

    def _connection_lost(self, rank: int, text: str) -> ConnectionLost:
        """Return the error for a process that exists; ``text`` says what it does not do, ``{}`` in which method."""
        call, info = self._first_call(rank), self.handles.infos[rank]
        role, method = (call.role, call.method) if call else (self.name, NO_CALL)
        return ConnectionLost(
            f"{self._label(role, rank)} {text.format(method)}",
            role=role,
            rank=rank,
            node=info.node,
            pid=info.pid,
            method=method,
        )

    def _report_late(self) -> bool:
        """Report who waits for whom in a call that is late, or end the group; see ``watch_answers``."""
        if self.handles.ended:
            return False
        call = next(iter(tuple(self._calls.values())), None)
        if call is not None and call.pending and self._late.look(call, self.coordinates.get(call.role, ())):
            call.end_late(time.monotonic() - call.started)
        return not self.handles.ended

    def _frozen(self, rank: int, seconds: float, reason: str) -> None:
        """Report a process that does not answer, or end the group; called by the watch, see ``watch_answers``."""
        text = f"has not answered for {seconds:.0f} s in {{}}: {reason}"
        limit = self.handles.options.end_frozen_after
        if limit is not None and seconds >= limit:
            text = f"{text}; end_frozen_after is {limit:g} s"
            self._break(partial(self._connection_lost, rank, text), between_calls=True)
        elif not self.handles.ended:
            _logger.warning("%s", self._connection_lost(rank, text))

    def time_out(
        self, role: str, method: str, called: Sequence[int], late: Sequence[int], seconds: float, what: str
    ) -> GroupError:
        """Break the group because of a call that is late, and return the error; see ``late_error``."""
        infos, coordinates = self.handles.infos, self.coordinates.get(role, ())
        return self._break(
            lambda: late_error(role, method, called, late, seconds, what, infos, coordinates, QUERY_SECONDS)
        )

    def values_late(self, late: ValuesLate, timeout: float) -> GroupError:
        """End the group whose processes did not send values of a finished call in time; return its error."""
        actors = {handle.actor for handle in late.handles}
        group = next((group for group in [self, *_living] if actors & set(group.handles.actor_ids)), self)
        ranks = [rank for rank, actor in enumerate(group.handles.actor_ids) if actor in actors]
        numbers = {handle.number for handle in late.handles}
        known = next((each for each in tuple(group.keeping) if each.number in numbers), None)
        role, method = (known.role, known.method) if known else (group.name, "an earlier call")
        return group.time_out(role, method, ranks, ranks, timeout, VALUES_LATE)

    # ---- the first cause ---------------------------------------------------------------------------------------------

    def _find_cause(self) -> None:
        """Break the group by the first cause of the failures, or fail a call whose arguments were never produced."""
        failures = self._drain()
        for call in {failure.call for failure in failures if failure.call is not None}:
            own = [failure for failure in failures if failure.call is call]
            if len(own) == len(call.ranks) and all(failure.upstream for failure in own):  # no rank has started it
                call.error = self._cause_of(own)
                self._calls.pop(call.number, None)
                self._failures = [entry for entry in self._failures if entry[0] is not call]
                failures = [failure for failure in failures if failure.call is not call]
        if failures:
            between_calls = all(failure.call is None for failure in failures)
            self._break(lambda: self._cause_of(failures), between_calls=between_calls)
        self.hub.wake()

    def fail(self, error: GroupError) -> None:
        """Break the group because of a failure that its calls do not have."""
        self._break(lambda: error)

    def _break(self, find: Callable[[], GroupError], *, between_calls: bool = False) -> GroupError:
        """End the processes because of a failure; ``find`` returns it, unless another one came first. Return that."""
        with self._lock:
            if self.handles.cause is None:
                cause = find()
                if self.handles.ended:  # by another thread meanwhile: nothing is left to be broken
                    return cause
                self._unraised = between_calls and not self._calls
                self.handles.cause = cause
                if self._unraised:
                    _logger.warning("%s", str(cause).partition("\n")[0])
            if not self.handles.killed:
                self.handles.end()
            return self.handles.cause

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
        if self.handles.cause is None and not self.handles.ended:
            self._break(lambda: self._cause_of(self._drain()))
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
        failed = [call for call in {id(call): call for call, _, _ in self._failures}.values() if call is not None]
        failing = {rank for _, rank, _ in self._failures}
        lost = [since for rank, since in tuple(self._lost.items()) if rank in failing]
        began = min(lost, default=time.monotonic())
        left = max(DRAIN_SECONDS / 2, DRAIN_SECONDS + began - time.monotonic())  # Ray's cause comes after the loss
        self.hub.wait(lambda: bool(failed) and all(call.pending <= failing for call in failed), left)
        self._look_for_deaths()
        found: dict[int, RankFailure] = {}
        for call, rank, error in self._failures:
            role, method = (call.role, call.method) if call else (self.name, NO_CALL)
            found.setdefault(rank, RankFailure(self._label(role, rank), method, error, call))
        return list(found.values())

    def _label(self, role: str, rank: int) -> RankLabel:
        coordinates = self.coordinates.get(role)
        return RankLabel(role, rank, coordinates[rank] if coordinates else {}, self.handles.infos[rank])


_living: weakref.WeakSet[GroupProcesses] = weakref.WeakSet()


def error_of_process(actor: str) -> GroupError | None:
    """Return the error that ended the process with Ray's id ``actor``; None if no group of this driver knows it."""
    return next(filter(None, (group.error_for(actor) for group in list(_living))), None)


def living_groups() -> list[GroupProcesses]:
    """Return the groups of this driver that have not ended."""
    return [group for group in list(_living) if not group.handles.ended]


def _on_thread(function: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=function, args=args, name=function.__name__, daemon=True).start()


def _is_incomplete(failures: Sequence[RankFailure]) -> bool:
    """Return whether more failures are expected: all known ones are consequences of another, and ranks are pending."""
    consequences = all(failure.follows for failure in failures) or all(failure.upstream for failure in failures)
    return consequences and (not failures or any(failure.call and failure.call.pending for failure in failures))


def _with_objects(arguments: Arguments) -> Arguments:
    """Return the arguments with each of Ray's references replaced by a ``Deferred``: the rank reads its value."""
    if not any(isinstance(value, ray.ObjectRef) for value in (*arguments.args, *arguments.kwargs.values())):
        return arguments
    args = tuple(map(_with_object, arguments.args))
    return Arguments(args, {name: _with_object(value) for name, value in arguments.kwargs.items()})


def _with_object(value: Any) -> Any:
    return StoredValue(value, raw=True) if isinstance(value, ray.ObjectRef) else value
