"""Handles: values that are kept elsewhere, in the object store or in the process that computed them.

The result of a non-blocking call that may be passed on stays in the worker process (a ``RemoteValue``). The process
that needs it asks the other one, on the channel, and gets the value in a message, or a reference to the object store.
The controller only passes the address. A value is released when its last handle in the controller is garbage-collected.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from mcontroller.channel.address import Address
from mcontroller.channel.controller import ask_each
from mcontroller.errors import GroupError
from mcontroller.ray.values.references import WrittenReference, read_reference, write_reference
from mcontroller.ray.values.wire import decode
from mcontroller.trace.recorder import DATA, recorder
from mcontroller.transport import Deferred, Fetch, countdown


class ArgumentLost(GroupError):
    """The process producing an argument died; ``actor`` is Ray's id of the process."""

    actor: str


class ArgumentFailed(Exception):
    """A call of another group failed to produce an argument; ``error`` is the failure."""

    def __init__(self, error: GroupError) -> None:
        super().__init__(str(error))
        self.error = error


class ValuesLate(Exception):
    """Values have not arrived in time.

    Attributes:
        handles: their handles; empty if they are not known.
    """

    def __init__(self, handles: Sequence[RemoteValue] = ()) -> None:
        super().__init__(f"{len(handles)} values")
        self.handles = handles


class KeptValues:
    """Releases the results of a call in the worker processes when it is garbage-collected.

    Args:
        release: called once by the garbage collector; does not wait.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        weakref.finalize(self, release).atexit = False


@dataclass(frozen=True, eq=False, slots=True)
class RemoteValue:
    """The value that a call returned on one rank, or its outline.

    Attributes:
        address: where the process of the rank listens.
        actor: Ray's id of the process.
        caller: the controller of the call.
        number: the number of the call there.
        outline: whether this is the outline.
        kept: keeps the value from being released; only in the controller.
    """

    address: Address
    actor: str
    caller: bytes
    number: int
    outline: bool = False
    kept: KeptValues | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteValue, (self.address, self.actor, self.caller, self.number, self.outline)


class StoredValue(Deferred):
    """A value in the object store, which exists as long as this handle does in the process that created it.

    Args:
        reference: the object.
    """

    def __init__(self, reference: ray.ObjectRef[Any]) -> None:
        self.reference = reference

    def __reduce__(self) -> tuple[Any, ...]:
        return _stored_value, (write_reference(self.reference),)

    def handles(self) -> Sequence[Any]:
        """Return this handle."""
        return (self,)

    def resolve(self, fetch: Fetch) -> Any:
        """Return the value."""
        return fetch((self,))[0]


def _stored_value(written: WrittenReference) -> StoredValue:
    return StoredValue(read_reference(written))


def fetch(handles: Sequence[Any], timeout: float | None = None) -> list[Any]:
    """Return the values of handles, private to the caller. Waits until they have been computed.

    Raises:
        ValuesLate: one has not arrived in ``timeout`` seconds.
        ArgumentLost: the process producing one of them died.
        ArgumentFailed: the call producing one of them failed.
    """
    remote = [handle for handle in handles if isinstance(handle, RemoteValue)]
    left = countdown(timeout)
    try:
        values = iter(_fetch_remote(remote, left) if remote else ())
        return [
            next(values) if isinstance(handle, RemoteValue) else ray.get(handle.reference, timeout=left()).unpack()
            for handle in handles
        ]
    except ray.exceptions.GetTimeoutError:
        raise ValuesLate(remote) from None


def _fetch_remote(handles: Sequence[RemoteValue], left: Callable[[], float | None]) -> list[Any]:
    begin = time.monotonic_ns()
    queries = [("value", (handle.caller, handle.number, handle.outline)) for handle in handles]
    answers, late = ask_each([handle.address for handle in handles], queries, left())
    if late:
        raise ValuesLate([handles[position] for position in late])
    messages = []
    for handle, answer in zip(handles, answers, strict=True):
        if answer is None:
            raise _lost(handle, "its connection was closed")
        (error, data), frames = answer
        if error is not None:
            raise ArgumentFailed(error)
        messages.append((data, frames))
    try:
        values = decode(messages, timeout=left())
        if (trace := recorder()) is not None:
            for handle in handles:
                trace.add(f"{DATA}{handle.actor}", begin, time.monotonic_ns(), handle.number)
        return values
    except ray.exceptions.ObjectLostError as error:  # the process died between its answer and our reading
        raise _lost(handles[0], str(error)) from None


def _lost(handle: RemoteValue, why: str) -> ArgumentLost:
    return ArgumentLost(f"process producing an argument on {handle.address.host} died: {why}", actor=handle.actor)
