"""Calls over Ray on the controller's side, in the order of their steps.

``RayExecutor.submit`` encodes the arguments and sends a message to every rank. ``GroupProcesses`` adds the answers to
their call, ``GroupCall``, whose caller reads the values. ``mcontroller.ray.process.WorkerProcess.serve`` runs the call
in between. What goes wrong is the matter of ``supervision``.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from typing_extensions import Buffer

from mcontroller.channel.controller import CallOrder, Hub, ask, notify, notify_from_finalizer
from mcontroller.channel.wire import CallHeader, Place, pack_call, unpack_answer
from mcontroller.errors import CallRejected, DataError, GroupBroken, GroupError, ResourceError, WorkerDied
from mcontroller.ray.calls.supervision import (
    LOST_SECONDS,
    QUERY_SECONDS,
    VALUES_LATE,
    CallState,
    SentCall,
    Supervision,
    error_of_process,
)
from mcontroller.ray.process_handles import GroupState, ProcessHandles
from mcontroller.ray.values.handles import (
    ArgumentFailed,
    ArgumentLost,
    KeptValues,
    RemoteValue,
    StoredValue,
    ValuesLate,
    fetch,
)
from mcontroller.ray.values.wire import Encoded, decode, encode, pack
from mcontroller.transport import Arguments, Deferred

PLACE_SECONDS = 0.5
"""Time between two looks whether rank 0, which was asked for a place, still exists."""


class RayExecutor:
    """The ranks of ``role`` in the processes of a group; see ``mcontroller.transport.Executor``.

    Args:
        processes: the processes of the group.
        role: the role that is called.
        of_process: whether calls are those of the processes themselves, ``__init__`` and ``before_shutdown`` of all
            their roles; ``role`` is then the one that errors name.
    """

    transport = "ray"

    def __init__(self, processes: GroupProcesses, role: str, *, of_process: bool = False) -> None:
        self.processes = processes
        self.role = role
        self._called_role = None if of_process else role
        processes.executors.add(self)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.processes.handles.infos)

    @property
    def nodes(self) -> Sequence[str]:
        """The address of the node of every rank."""
        return [info.node for info in self.processes.handles.infos]

    @property
    def threads(self) -> Sequence[int | None]:
        """The threads that every rank computes with on the CPU; None for those that Ray has set."""
        return [info.threads for info in self.processes.handles.infos]

    def set_coordinates(self, coordinates: Sequence[Mapping[str, int]]) -> None:
        """Set the coordinates of each rank, by rank, for error messages."""
        self.processes.supervision.coordinates[self.role] = coordinates

    def share(self, value: Any, readers: int) -> Any:
        """Return a ``StoredValue`` if several ranks read a large value, else the value."""
        try:
            packed = pack(value) if readers > 1 else None
        except DataError:
            return value  # submit names the argument and the method
        if packed is None or not packed.is_large(self.processes.handles.options.inline_bytes):
            return value
        return StoredValue(ray.put(packed))

    def submit(
        self,
        method: str,
        arguments: Mapping[int, Arguments],
        returning: Sequence[int],
        *,
        timeout: float | None = None,
        keep: bool = False,
    ) -> GroupCall:
        """Send a call to its ranks; see ``mcontroller.transport.Executor.submit``.

        Raises:
            DataError: an argument cannot be sent.
            CallTimeout: rank 0 has not given the call a place before its deadline.
        """
        processes, supervision = self.processes, self.processes.supervision
        with processes.sending:
            supervision.check(self.role)
            number = next(processes.numbers)
            call = GroupCall(processes, number, self.role, method, tuple(arguments), returning, timeout, keep)
            encoded = self._encode(call, arguments)
            places = processes.places(call) if supervision.detached else []
            try:  # whoever assigns a place sends the call: the ranks wait for it before they run the next one
                places = places or processes.order.assign(processes.hub.name, number, call.ranks)
                messages = self._messages(call, min(supervision.calls, default=number), places, arguments, encoded)
                supervision.calls[number] = call
                if keep:
                    supervision.keeping.add(call)
                processes.hub.send(messages)
            except BaseException as error:
                text = f"{type(error).__name__} while {self.role}.{method} was being sent: {len(call.sent)} of "
                text += f"{len(call.ranks)} ranks are known to have it"  # which would wait for the others
                supervision.break_group(lambda: GroupError(text, role=self.role))
                raise
        return call

    def _encode(self, call: GroupCall, arguments: Mapping[int, Arguments]) -> dict[int, Encoded]:
        """Return the serialized arguments by their identity; the call keeps what they refer to."""
        inline_bytes = self.processes.handles.options.inline_bytes
        encoded: dict[int, Encoded] = {}
        for shard in arguments.values():
            if id(shard) not in encoded:
                try:
                    encoded[id(shard)] = encode(shard, inline_bytes)
                except DataError as error:
                    raise DataError(f"{self.role}.{call.method}: {error}", **error.fields) from error
                call.held.append(encoded[id(shard)].stored)
                values = (*shard.args, *shard.kwargs.values())
                call.held += [value.handles() for value in values if isinstance(value, Deferred)]
        return encoded

    def _messages(
        self,
        call: GroupCall,
        settled: int,
        places: Sequence[Place | None],
        arguments: Mapping[int, Arguments],
        encoded: Mapping[int, Encoded],
    ) -> Iterator[tuple[int, list[bytes]]]:
        """Yield the message of each rank; ranks with the same arguments and place have one.

        Args:
            call: the call.
            settled: see ``CallHeader``.
            places: by rank, in the order of ``arguments``.
            arguments: by rank.
            encoded: the serialized arguments, by their identity.
        """
        returning: dict[int, list[int]] = {}
        for rank in call.returning:
            returning.setdefault(id(arguments[rank]), []).append(rank)
        packed: dict[tuple[int, Place | None], list[bytes]] = {}
        for (rank, shard), after in zip(arguments.items(), places, strict=True):
            key = id(shard), after
            if key not in packed:
                ranks = returning.get(id(shard), ())
                header = CallHeader(call.number, settled, after, self._called_role, call.method, ranks, call.keep)
                packed[key] = [pack_call(header, encoded[id(shard)].data), *encoded[id(shard)].frames]
            call.sent[rank] = packed[key]  # to be sent again if the connection is lost
            yield rank, packed[key]

    def fetch(self, handles: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Return the values of handles; raise the error of the call that failed to produce one.

        Raises:
            CallTimeout: a value has not arrived in ``timeout`` seconds.
            GroupBroken: the processes that had a value have ended.
        """
        try:
            return fetch(handles, timeout)
        except ArgumentFailed as failed:
            raise failed.error from None
        except ArgumentLost as lost:
            cause = error_of_process(lost.actor)
            if cause is None:
                raise
            text = f"values of {self.role} were in processes that have ended; first cause: {cause}"
            raise GroupBroken(text, role=self.role, first_cause=cause) from cause
        except ValuesLate as late:
            raise self.processes.supervision.values_late(late, timeout or 0.0) from None

    @property
    def broken(self) -> GroupError | None:
        """The failure that broke the group."""
        return self.processes.handles.cause

    def fail(self, error: GroupError) -> None:
        """Break the group; see ``mcontroller.transport.Executor.fail``."""
        self.processes.supervision.break_group(lambda: error)

    def restart(self, timeout: float | None = None) -> None:
        """Replace the processes, with every role that they run; see ``GroupProcesses.restart``."""
        self.processes.restart(timeout)

    def shutdown(self, timeout: float | None = None) -> None:
        """Call ``before_shutdown`` of the workers, end the processes with every role that they run, and free the slots.

        A second call does nothing. Workers are not called if a call (of this driver or another) is still running, if
        the group is broken, or if its processes are gone.

        Args:
            timeout: deadline of ``before_shutdown`` in seconds; None for no deadline.

        Raises:
            WorkerError: a worker's ``before_shutdown`` raised; the processes have been ended all the same.
            CallTimeout: ``before_shutdown`` did not return in time, or a rank is stopped (by SIGSTOP or a debugger) for
                ``QUERY_SECONDS``; the processes have been ended all the same.
        """
        processes = self.processes
        try:
            with processes.sending:
                call = None
                if processes.is_idle(timeout):
                    nothing = dict.fromkeys(range(self.world_size), Arguments())
                    of_process = RayExecutor(processes, processes.name, of_process=True)
                    with contextlib.suppress(GroupBroken, WorkerDied):  # it broke since the look
                        call = of_process.submit("before_shutdown", nothing, (), timeout=timeout)
            if call is not None:
                processes.supervision.end_if_stopped(call)
                for keeping in tuple(processes.supervision.keeping):
                    keeping.read_before_end(call.remaining())
                with contextlib.suppress(WorkerDied):
                    call.check()
        finally:
            processes.handles.end()


class GroupProcesses:
    """The processes of the group ``name``, which the executors of all its roles send their calls to.

    Attributes:
        name: name of the group.
        handles: the processes themselves, and the first cause if they were ended by a failure.
        hub: the connections to the processes; its name identifies this controller in the calls that it sends.
        supervision: the calls in flight, and what goes wrong.
        executors: the executors of its roles.
        launch_again: starts such processes once more, but not on nodes with these ids; None if another driver has
            started them.
        sending: held while a call is sent, so that all ranks get the calls of several threads in one order.
        numbers: the numbers of calls.
        order: assigns the places of calls, if this controller is the only one.
    """

    def __init__(self, name: str, handles: ProcessHandles, *, detached: bool = False) -> None:
        self.name, self.handles = name, handles
        self.executors: weakref.WeakSet[RayExecutor] = weakref.WeakSet()
        self.launch_again: Callable[[float | None, Set[str]], GroupProcesses] | None = None
        self.sending = threading.RLock()
        self.numbers = itertools.count()
        self.order = CallOrder()
        itself = weakref.proxy(self)  # the hub must not keep an unused group from being garbage-collected
        self.hub = Hub(
            uuid.uuid4().hex.encode(),
            lambda rank, frames: itself._deliver(rank, frames),
            lambda rank, established: itself.supervision.connection_changed(rank, established),
        )
        self.supervision = Supervision(name, handles, self.hub, detached=detached)
        self.hub.connect([info.address for info in handles.infos])
        self.supervision.start()

    def _deliver(self, rank: int, frames: list[Any]) -> None:
        """Add the answer of a rank to its call; the hub's lock is held."""
        number, error, stored, data = unpack_answer(frames[0])
        call = self.supervision.calls.get(number)
        if call is None or rank not in call.pending:  # the answer was sent again
            return
        if error is None:
            call.add(rank, data, frames[1:], stored)
        elif isinstance(error, CallRejected) and (error.role, error.method) == (call.role, call.method):
            self.supervision.rejected(call, rank, error)
        else:
            self.supervision.failed(call, rank, error)
        self.supervision.answered(call, rank)

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
                raise self.supervision.time_out(call.role, call.method, (0,), (0,), call.timeout, what)
            time.sleep(LOST_SECONDS)  # the connection may be lost
        return [None] * len(call.ranks)  # nothing is sent any more

    def is_idle(self, timeout: float | None) -> bool:
        """Return whether no call runs, of this controller or another, on a group that works."""
        if not self.handles.ended:
            self.hub.wait(lambda: True, 0)  # receive what has arrived
        if self.supervision.state is not GroupState.READY or self.supervision.failures:
            return False
        if not self.supervision.detached:
            return True
        limit = QUERY_SECONDS if timeout is None else min(QUERY_SECONDS, timeout)
        answers = ask([info.address for info in self.handles.infos], "idle", timeout=limit)
        return all(answer is not None and answer[0] for answer in answers)

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
        cause = self.supervision.break_group(lambda: restarted)
        self.handles.end()
        self.handles.enter(GroupState.RESTARTING)
        try:
            after = self.launch_again(timeout, self.handles.gone)
        except BaseException:
            self.handles.enter(GroupState.BROKEN)
            raise
        self.handles.enter(GroupState.ENDED)
        self.handles.cause, self.handles.hub = cause, None
        after.supervision.earlier = [*self.supervision.earlier, self.handles]
        after.supervision.coordinates = self.supervision.coordinates
        for executor in list(self.executors):
            executor.processes = after
            after.executors.add(executor)


class GroupCall(SentCall):
    """A call that was sent to its ranks, until its caller has read the values; see ``InFlightCall``.

    Args:
        processes: the processes that run it.
        number: see ``SentCall``, as the three that follow.
        role: see there.
        method: see there.
        ranks: see there.
        returning: the ranks whose values come back, in the order of the results.
        timeout: deadline in seconds from now; None for no deadline.
        keep: whether the values stay in the processes until they are asked for.
    """

    def __init__(
        self,
        processes: GroupProcesses,
        number: int,
        role: str,
        method: str,
        ranks: tuple[int, ...],
        returning: Sequence[int],
        timeout: float | None,
        keep: bool,
    ) -> None:
        super().__init__(processes.supervision, number, role, method, ranks, timeout)
        self.returning, self.keep = returning, keep
        self._processes = processes  # which delivers the answers
        self._handles, self._caller = processes.handles, processes.hub.name
        self._returned = frozenset(returning)
        self._answers: dict[int, tuple[Buffer, Sequence[Buffer]]] = {}
        self._stored: list[int] = []
        self._values: list[Any] | None = None
        self._kept = self._keep_values() if keep else None

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
        if self._values is None:
            if self.keep and self._handles.ended:
                raise self.lost_with_group()
            try:
                left = None if limit is None else max(0.0, began + limit - time.monotonic())
                self._values = self._read(left)
            except ValuesLate as late:
                ids = self._handles.actor_ids
                ranks = [ids.index(handle.actor) for handle in late.handles] or self.ranks
                self.error = self.supervision.time_out(self.role, self.method, ranks, ranks, limit or 0.0, VALUES_LATE)
                raise self.error from None
            self._answers.clear()
            self._kept = None
        return self._values

    def _read(self, timeout: float | None) -> list[Any]:
        if self.keep:
            return fetch(self.parts, timeout)
        try:
            return decode([self._answers[rank] for rank in self.returning], timeout)
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
    """Release the result of a call on ranks, unless their processes have been ended."""
    if not handles.killed:
        notify_from_finalizer([handles.infos[rank].address for rank in ranks], "release", caller, number)
