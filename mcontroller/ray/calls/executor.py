"""RayExecutor: sends the calls of one role to its worker processes, and receives the values."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from typing_extensions import Buffer

from mcontroller.channel.queries import notify_from_finalizer
from mcontroller.errors import GroupBroken, GroupError
from mcontroller.ray.calls.call import GroupCall
from mcontroller.ray.calls.shutdown import shutdown
from mcontroller.ray.calls.states import CallState
from mcontroller.ray.calls.supervision import GroupProcesses, error_of_process
from mcontroller.ray.process_handles import ProcessHandles
from mcontroller.ray.values.handles import (
    ArgumentFailed,
    ArgumentLost,
    KeptValues,
    RemoteValue,
    Source,
    StoredValue,
    ValuesLate,
    fetch,
)
from mcontroller.ray.values.wire import decode, is_larger, store
from mcontroller.transport import Arguments, Deferred, countdown

__all__ = ["RayCall", "RayExecutor"]


class RayExecutor:
    """The ranks of ``role`` in the processes of a group; see ``mcontroller.transport.Executor``."""

    transport = "ray"

    def __init__(self, processes: GroupProcesses, role: str) -> None:
        self.processes = processes
        self.role = role
        processes.executors.add(self)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.processes.world_size

    @property
    def nodes(self) -> Sequence[str]:
        """The address of the node of every rank."""
        return self.processes.nodes

    @property
    def threads(self) -> Sequence[int | None]:
        """The threads that every rank computes with on the CPU; None for those that Ray has set."""
        return [info.threads for info in self.processes.handles.infos]

    def set_coordinates(self, coordinates: Sequence[Mapping[str, int]]) -> None:
        """Set the coordinates of each rank, by rank, for error messages."""
        self.processes.coordinates[self.role] = coordinates

    def share(self, value: Any, readers: int) -> Any:
        """Return a ``StoredValue`` if several ranks read a large value, else the value."""
        if readers <= 1 or not is_larger(value, self.processes.handles.options.inline_bytes):
            return value
        return StoredValue(store(value))

    def submit(
        self,
        method: str,
        arguments: Mapping[int, Arguments],
        returning: Sequence[int],
        *,
        timeout: float | None = None,
        keep: bool = False,
    ) -> RayCall:
        """Send a call to its ranks; see ``mcontroller.transport.Executor.submit``."""
        processes = self.processes
        with processes.sending:
            processes.check(self.role)
            call = RayCall(
                processes,
                self.role,
                method,
                tuple(arguments),
                returning,
                timeout=timeout,
                number=next(processes.numbers),
                keep=keep,
            )
            objects = {id(each): _with_objects(each) for each in arguments.values()}
            for each in objects.values():
                values = (*each.args, *each.kwargs.values())
                call.held += [value.handles() for value in values if isinstance(value, Deferred)]
            try:
                sent = [objects[id(each)] for each in arguments.values()]
                processes.hub.send(processes.messages(call, self.role, method, sent))
            except BaseException as error:
                processes.break_while_sending(call, error)
                raise
        return call

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
        with contextlib.suppress(GroupError):
            self.processes.check(self.role)
        return self.processes.cause

    def restart(self, timeout: float | None = None) -> None:
        """Replace the processes, with every role that they run; see ``GroupProcesses.restart``."""
        self.processes.restart(timeout)

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut down the processes, and with them every role that they run; see ``shutdown``."""
        shutdown(self.processes, timeout)


class RayCall(GroupCall):
    """A call of a role, as its caller has it; see ``mcontroller.transport.InFlightCall``.

    Args: the group, and as ``GroupCall``.
    """

    def __init__(self, processes: GroupProcesses, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._processes = processes
        self._returned = frozenset(self.returning)
        self._kept = self._keep_values() if self.keep else None
        self._answers: dict[int, tuple[Buffer, Sequence[Buffer]]] = {}
        self._stored: list[int] = []
        self._values: list[Any] | None = None

    def take(self, rank: int, data: Buffer, frames: Sequence[Buffer], stored: bool) -> None:
        """Keep the answer of a rank until it is read; if it is in the object store, until it is released there."""
        if rank in self._returned and not self.keep:
            self._answers[rank] = data, frames
            if stored:
                self._stored.append(rank)
                self._kept = self._kept or self._keep_values()

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
        handles = self._processes.handles
        source = Source(handles.infos[rank].address, handles.actor_ids[rank])
        return RemoteValue(source, self._processes.caller, self.number, outline, self._kept)

    def _keep_values(self) -> KeptValues:
        handles, caller = self._processes.handles, self._processes.caller
        return KeptValues(partial(_release, handles, tuple(self.returning), caller, self.number))

    def result(self, timeout: float | None = None, *, joined: bool = False) -> list[Any]:
        """Wait for every rank and return the values; see ``InFlightCall.result``."""
        limit = self.timeout if timeout is None else timeout
        left = countdown(limit)
        self.check(timeout)
        if self._values is None:
            if self.keep and self._processes.handles.ended:
                self._processes.raise_ended(self)
            try:
                self._values = self._read(joined, left())
            except ValuesLate as late:
                self.error = self._processes.values_late(late, limit or 0.0, self)
                raise self.error from None
            self._answers.clear()
            self._kept = None
        return self._values

    def _read(self, joined: bool, timeout: float | None) -> list[Any]:
        if self.keep:
            return fetch(self.parts, timeout)
        try:
            return decode([self._answers[rank] for rank in self.returning], joined, timeout)
        except GetTimeoutError:
            sources = [self._handle(rank, outline=False).source for rank in self._stored]
            raise ValuesLate([(source, self.number) for source in sources]) from None

    def read_before_end(self, timeout: float) -> bool:
        """Read values that the processes keep, because they are about to be ended; return whether all are here."""
        if self.keep and self._values is None and self.error is None and self.state is CallState.ANSWERED:
            try:
                self._values = fetch(self.parts, timeout)
            except ValuesLate:
                return False
            except (GroupError, ArgumentFailed):  # the reader gets the reason why the group ended
                pass
        return True

    def check(self, timeout: float | None = None) -> None:
        """Wait for every rank and raise the error of the call, if it failed."""
        try:
            self._processes.settle(self, timeout)
        except GroupError as error:
            self.error = error
            raise

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every rank has answered or failed; return whether that happened in time."""
        return self._processes.wait(self, timeout)

    def done(self) -> bool:
        """Whether every rank has answered or failed. Does not wait."""
        return self.wait(0.0)

    def cancel(self) -> None:
        """Cancel the call on all ranks if none has started it; otherwise all run it, and the values are dropped."""
        if self._values is None and self.error is None:
            text = f"{self.role}.{self.method} was cancelled"
            self.error = GroupError(text, role=self.role, method=self.method)
            if self.state in (CallState.SENT, CallState.RUNNING):
                self.change(CallState.CANCELLED)
            self._processes.cancel(self)


def _with_objects(arguments: Arguments) -> Arguments:
    """Return the arguments with each of Ray's references replaced by a ``Deferred``: the rank reads its value."""
    if not any(isinstance(value, ray.ObjectRef) for value in (*arguments.args, *arguments.kwargs.values())):
        return arguments
    args = tuple(map(_with_object, arguments.args))
    return Arguments(args, {name: _with_object(value) for name, value in arguments.kwargs.items()})


def _with_object(value: Any) -> Any:
    return StoredValue(value, raw=True) if isinstance(value, ray.ObjectRef) else value


def _release(handles: ProcessHandles, ranks: Sequence[int], caller: bytes, number: int) -> None:
    """Release the result of a call on ranks, unless their processes have been ended."""
    if not handles.killed:
        notify_from_finalizer([handles.infos[rank].address for rank in ranks], "release", caller, number)
