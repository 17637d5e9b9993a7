"""RayExecutor: sends the calls of one role to its worker processes, and receives the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from typing_extensions import Buffer

from mcontroller.channel.queries import notify_from_finalizer
from mcontroller.errors import GroupError
from mcontroller.ray.call_messages import CallHeader, write_call
from mcontroller.ray.calls.sent_call import SentCall
from mcontroller.ray.calls.supervision import GroupProcesses
from mcontroller.ray.process_handles import ProcessHandles
from mcontroller.ray.values.handles import (
    ArgumentFailed,
    KeptValues,
    RemoteValue,
    Source,
    StoredValue,
    ValuesLate,
    fetch,
)
from mcontroller.ray.values.wire import decode, encode, is_larger, is_stored, store
from mcontroller.transport import Arguments, Deferred, countdown

__all__ = ["RayCall", "RayExecutor"]


class RayExecutor:
    """The ranks of ``role`` in the processes of a group; see ``mcontroller.transport.Executor``."""

    transport = "ray"

    def __init__(self, processes: GroupProcesses, role: str) -> None:
        self.processes = processes
        self.role = role

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
        processes, expected = self.processes, frozenset(returning)
        readers: dict[int, list[int]] = {}
        for rank, each in arguments.items():
            returning_ranks = readers.setdefault(id(each), [])
            if rank in expected:
                returning_ranks.append(rank)
        with processes.sending:
            processes.check(self.role)
            call = RayCall(
                processes,
                self.role,
                method,
                tuple(arguments),
                returning,
                timeout=timeout,
                number=processes.next_call(),
                keep=keep,
            )
            messages: dict[int, tuple[bytes, list[bytes]]] = {}
            ordered = []
            for each in arguments.values():
                key = id(each)
                message = messages.get(key)
                if message is None:
                    header = (self.role, method, readers[key], keep)
                    message = messages[key] = self._message(call, header, each)
                ordered.append(message)
            try:
                processes.hub.send(call.outgoing(zip(processes.heads(call), ordered, strict=True)))
            except BaseException as error:
                processes.break_while_sending(call, error)
                raise
        return call

    def _message(self, call: RayCall, header: CallHeader, arguments: Arguments) -> tuple[bytes, list[bytes]]:
        """Return the body and the frames of a message, and keep what it refers to until the call is complete."""
        arguments = _with_objects(arguments)
        encoded = encode(arguments, self.processes.handles.options.inline_bytes)
        deferred = (value for value in (*arguments.args, *arguments.kwargs.values()) if isinstance(value, Deferred))
        call.held += [encoded.stored, *(value.handles() for value in deferred)]
        return write_call(header, encoded.content), encoded.frames

    def fetch(self, handles: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Return the values of handles; raise the error of the call that failed to produce one.

        Raises:
            CallTimeout: a value has not arrived in ``timeout`` seconds.
        """
        try:
            return fetch(handles, timeout)
        except ArgumentFailed as failed:
            raise failed.error from None
        except ValuesLate as late:
            raise self.processes.values_late(late, timeout or 0.0) from None

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut down the processes, and with them every role that they run; see ``GroupProcesses.shutdown``."""
        self.processes.shutdown(timeout)


class RayCall(SentCall):
    """A call of a role; see ``mcontroller.transport.InFlightCall``."""

    def __init__(
        self,
        processes: GroupProcesses,
        role: str,
        method: str,
        ranks: tuple[int, ...],
        returning: Sequence[int],
        *,
        timeout: float | None,
        number: int,
        keep: bool,
    ) -> None:
        super().__init__(role, method, ranks, timeout=timeout, number=number)
        self._processes = processes
        self._returning = returning
        self._returned = frozenset(returning)
        self._keep = keep
        self._kept = self._keep_values(returning) if keep else None
        self._contents: dict[int, tuple[tuple[Any, ...], Sequence[Buffer]]] = {}
        self._values: list[Any] | None = None
        if keep:
            processes.keep_until_end(self)

    def take(self, rank: int, content: tuple[Any, ...], frames: Sequence[Buffer]) -> None:
        """Keep the answer of a rank until it is read; if it is in the object store, until it is released there."""
        if rank in self._returned and not self._keep:
            self._contents[rank] = content, frames
            if self._kept is None and is_stored(content):
                self._kept = self._keep_values(self._returning)

    @property
    def parts(self) -> list[Any]:
        """Handles of the returned values, in the order of the results."""
        return [self._handle(rank, outline=False) for rank in self._returning]

    @property
    def outlines(self) -> list[Any]:
        """Handles of the outlines of the returned values; empty unless they are kept on the ranks."""
        return [self._handle(rank, outline=True) for rank in self._returning] if self._keep else []

    @property
    def is_read(self) -> bool:
        """Whether the values are in this process."""
        return self._values is not None

    def _handle(self, rank: int, *, outline: bool) -> RemoteValue:
        handles = self._processes.handles
        source = Source(handles.infos[rank].address, handles.actor_ids[rank])
        return RemoteValue(source, self._processes.caller, self.number, outline, self._kept)

    def _keep_values(self, ranks: Sequence[int]) -> KeptValues:
        handles, caller = self._processes.handles, self._processes.caller
        return KeptValues(partial(_release, handles, tuple(ranks), caller, self.number))

    def result(self, timeout: float | None = None, *, joined: bool = False) -> list[Any]:
        """Wait for every rank and return the values; see ``InFlightCall.result``."""
        limit = self.timeout if timeout is None else timeout
        left = countdown(limit)
        self._settle(timeout)
        if self._values is None:
            if self._keep and self._processes.handles.ended:
                self._processes.raise_ended(self)
            try:
                self._values = self._read(joined, left())
            except ValuesLate as late:
                self.error = self._processes.values_late(late, limit or 0.0, self)
                raise self.error from None
            self._contents.clear()
            self._kept = None
        return self._values

    def _read(self, joined: bool, timeout: float | None) -> list[Any]:
        if self._keep:
            return fetch(self.parts, timeout)
        try:
            return decode([self._contents[rank] for rank in self._returning], joined, timeout)
        except GetTimeoutError:
            stored = [rank for rank in self._returning if is_stored(self._contents[rank][0])]
            raise ValuesLate([(self._handle(rank, outline=False).source, self.number) for rank in stored]) from None

    def read_before_end(self, timeout: float) -> bool:
        """Read the values that the processes keep, unless that was done or the call has failed."""
        if self._values is None and self.error is None and not (self.pending or self.failed):
            try:
                self._values = fetch(self.parts, timeout)
            except ValuesLate:
                return False
            except (GroupError, ArgumentFailed):  # the reader gets the reason why the group ended
                pass
        return True

    def check(self, timeout: float | None = None) -> None:
        """Wait for every rank and raise the error of the call, if it failed."""
        self._settle(timeout)

    def _settle(self, timeout: float | None) -> None:
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
