"""Calls over Ray on the controller's side: ``RayExecutor.submit`` encodes the arguments and sends them to every rank.

``mcontroller.ray.process.WorkerProcess.serve`` runs the call. ``GroupProcesses`` in ``supervision`` adds the answers to
it, a ``GroupCall``, whose caller reads the values; and finds the cause of what goes wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray

from mcontroller.channel.wire import CallHeader, Place, pack_call
from mcontroller.errors import DataError, GroupBroken, GroupError, WorkerDied
from mcontroller.ray.calls.supervision import GroupCall, GroupProcesses, error_of_process
from mcontroller.ray.values.handles import ArgumentFailed, ArgumentLost, StoredValue, ValuesLate, fetch
from mcontroller.ray.values.wire import Encoded, encode, pack
from mcontroller.transport import Arguments, Deferred


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
        self.processes.coordinates[self.role] = coordinates

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
        processes = self.processes
        with processes.sending:
            processes.check(self.role)
            number = next(processes.numbers)
            call = GroupCall(processes, number, self.role, method, tuple(arguments), returning, timeout, keep)
            encoded = self._encode(call, arguments)
            places = processes.places(call) if processes.detached else []
            try:  # whoever assigns a place sends the call: the ranks wait for it before they run the next one
                places = places or processes.order.assign(processes.hub.name, number, call.ranks)
                messages = self._messages(call, min(processes.calls, default=number), places, arguments, encoded)
                processes.calls[number] = call
                if keep:
                    processes.keeping.add(call)
                processes.hub.send(messages)
            except BaseException as error:
                text = f"{type(error).__name__} while {self.role}.{method} was being sent: {len(call.sent)} of "
                text += f"{len(call.ranks)} ranks are known to have it"  # which would wait for the others
                processes.break_group(lambda: GroupError(text, role=self.role))
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
            raise self.processes.values_late(late, timeout or 0.0) from None

    @property
    def broken(self) -> GroupError | None:
        """The failure that broke the group."""
        return self.processes.handles.cause

    def fail(self, error: GroupError) -> None:
        """Break the group; see ``mcontroller.transport.Executor.fail``."""
        self.processes.break_group(lambda: error)

    def restart(self, timeout: float | None = None) -> None:
        """Replace the processes, with every role that they run; see ``GroupProcesses.restart``."""
        processes = self.processes
        with processes.restarting:
            if self.processes is processes:  # no other thread has replaced them meanwhile
                processes.restart(timeout)

    def shutdown(self, timeout: float | None = None) -> None:
        """Call ``before_shutdown`` of the workers, end the processes with every role that they run, and free the slots.

        A second call does nothing. Workers are not called if a call (of this driver or another) is still running, if
        the group is broken, or if its processes are gone.

        Args:
            timeout: deadline of ``before_shutdown`` in seconds; None for no deadline.

        Raises:
            WorkerError: a worker's ``before_shutdown`` raised; the processes have been ended all the same.
            WorkerDied: a process ended in ``before_shutdown``.
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
                processes.finishing = call
                for keeping in tuple(processes.keeping):
                    keeping.read_before_end(call.remaining())
                call.check()
        finally:
            processes.handles.end()
