"""The interface between a group and the transport that carries its calls.

A group prepares a call and hands it to an ``Executor`` (in this process, or over Ray), which starts it on the ranks
and returns an ``InFlightCall``. Modules above do not depend on how values travel; transports do not interpret them.

* Ranks that get equal arguments get the *same* ``Arguments`` object. A transport serializes and stores it once.
* A value that is part of several ``Arguments`` (a plain argument next to split batches) goes through ``share`` first.
* An argument that is still on the workers is a ``Deferred``. It holds handles; the rank that needs the value fetches
  it (``resolve``). The value never passes through the controller.
* A rank that does not return its value drops it before anything is serialized.

On the rank, a transport calls ``resolve``, the worker's own method, ``complete`` and, for calls with ``keep``,
``outline``.
"""

from __future__ import annotations

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, Protocol

from typing_extensions import TypeVar

from mcontroller.errors import CallRejected, DispatchError, GroupError, MControllerError, WorkerError
from parallel_state.axes import DENSE_AXES

T_co = TypeVar("T_co", covariant=True, default=Any)

_idle_runners: list[asyncio.Runner] = []
"""The event loops of async methods in this process that run none now, the one that was used last at the end."""

Handle = Any
"""A transport's handle of a value that it keeps: in a worker process, in Ray's object store, or in this process."""


Fetch = Callable[..., list[Any]]
"""Called with handles, and optionally with a timeout in seconds: returns the values of the handles, in this order.

Each is private to the caller, who may write into it."""


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """Positional and keyword arguments of a method on one or more ranks. Compared by identity."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return Arguments, (self.args, self.kwargs)


class Deferred(ABC):
    """An argument whose value is stored elsewhere. Allowed only at the top level of ``Arguments``."""

    @abstractmethod
    def handles(self) -> Sequence[Handle]:
        """Return every handle that ``resolve`` may fetch. A transport keeps them alive and may prefetch them."""

    @abstractmethod
    def resolve(self, fetch: Fetch) -> Any:
        """Return the value, and fetch no more than it needs."""


class InFlightCall(Protocol):
    """A call that was sent to its ranks.

    ``parts``, ``outlines`` and the values of ``result`` have one entry for each returning rank, in the order of
    ``returning`` in ``Executor.submit``.
    """

    @property
    def number(self) -> int:
        """The number of the call among those of this caller to the same ranks."""

    @property
    def parts(self) -> Sequence[Handle]:
        """Handles of the values. Reading this does not wait and fetches nothing."""

    @property
    def outlines(self) -> Sequence[Handle]:
        """Handles of each value's ``outline``; empty unless submitted with ``keep=True``."""

    @property
    def is_read(self) -> bool:
        """Whether the values are in this process, so that ``result`` fetches nothing."""

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for *every* rank, returning or not, and return the values.

        A second call returns or raises the same.

        Args:
            timeout: seconds from now; can only shorten the deadline that the call was submitted with.

        Raises:
            GroupError: the call failed; ``mcontroller.errors`` has the types of failures.
        """

    def check(self, timeout: float | None = None) -> None:
        """Wait and raise as ``result`` does, but fetch no value."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every rank has answered or failed; return whether that happened in time. Does not raise."""

    def done(self) -> bool:
        """Whether every rank has answered or failed. Does not wait."""

    def cancel(self) -> None:
        """Cancel the call on all ranks if it has started on none of them.

        If the call is not complete, ``result`` raises GroupError afterwards, whether it was cancelled or not.
        """


class Future(Generic[T_co]):
    """The result of a call with ``blocking=False``, before it has arrived. If it is a batch, see ``DataProto``.

    It is no list of Ray's references: ``len`` and indexing raise an error that names ``get``.

    Args:
        call: the call that computes the result.
        collect: called with a timeout in seconds, or None; waits for the call and returns the result.
    """

    def __init__(self, call: InFlightCall, collect: Callable[[float | None], T_co]) -> None:
        self.call = call
        self._collect = collect

    def get(self, timeout: float | None = None) -> T_co:
        """Wait for the result and return it, or raise the error of the call, as a blocking call does.

        Args:
            timeout: seconds from now; a later result raises CallTimeout and breaks the group. None waits until the
                call's own deadline.

        Raises:
            GroupError: the call failed or was cancelled; ``mcontroller.errors`` has the types of failures.
        """
        return self._collect(timeout)

    def check(self, timeout: float | None = None) -> None:
        """Wait and raise as ``get`` does, but fetch nothing: the values stay on the workers."""
        self.call.check(timeout)

    def done(self) -> bool:
        """Whether every rank has answered or failed. Does not wait."""
        return self.call.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every rank has answered or failed; return whether that happened within ``timeout`` seconds."""
        return self.call.wait(timeout)

    def cancel(self) -> None:
        """Cancel the call on all ranks, or on none if one of them has started it.

        Unless the result was read before, ``get`` then raises GroupError, whether the call was cancelled or not. Calls
        of a LocalWorkerGroup have run already: cancelling them does nothing.
        """
        self.call.cancel()

    def __reduce__(self) -> NoReturn:
        raise DispatchError(
            f"a {type(self).__name__} cannot be sent inside another value: pass it as an argument by itself, or pass "
            "its result (get())"
        )

    def _not_arrived(self, *_: object) -> NoReturn:
        raise DispatchError(f"a {type(self).__name__} has no entries: call .get() on it, which waits for the result")

    __len__ = __getitem__ = __iter__ = _not_arrived

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'done' if self.done() else 'running'}, .get() returns the result)"


class Executor(Protocol):
    """The ranks of one role. A process that runs several roles has one executor for each of them."""

    @property
    def transport(self) -> str:
        """Name of the transport. Executors of one transport can fetch each other's handles."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def nodes(self) -> Sequence[str]:
        """The node of every rank, by rank."""

    @property
    def threads(self) -> Sequence[int | None]:
        """The threads that every rank computes with on the CPU, by rank; None if they are not known."""

    def set_coordinates(self, coordinates: Sequence[Mapping[str, int]]) -> None:
        """Set the coordinates of each rank, by rank, for error messages and traces."""

    def share(self, value: Any, readers: int) -> Any:
        """Return the form of ``value`` to pass in several ``Arguments``.

        The value itself if it is small or has one reader; otherwise a ``Deferred`` of a copy that is stored once.

        Args:
            value: the value.
            readers: the number of ranks that read it.
        """

    def submit(
        self,
        method: str,
        arguments: Mapping[int, Arguments],
        returning: Sequence[int],
        *,
        timeout: float | None = None,
        keep: bool = False,
    ) -> InFlightCall:
        """Start ``method`` on ranks, without waiting for it.

        Calls that are submitted one after another run in that order on every rank.

        Args:
            method: name of a method of the worker object.
            arguments: by rank that runs the method. Ranks with equal arguments have the same object.
            returning: the ranks whose values come back, in the order of the results.
            timeout: deadline of the call in seconds from now; None for no deadline.
            keep: whether the values stay where they are computed until they are fetched, and ``outlines`` exist.

        Raises:
            WorkerDied: a process ended before this call. What fails later is raised by ``InFlightCall.result``.
            GroupBroken: an earlier call has failed.
        """

    def fetch(self, handles: Sequence[Handle], timeout: float | None = None) -> list[Any]:
        """Return the values of handles of this transport in the calling process; see ``Fetch``.

        Raises:
            CallTimeout: one has not arrived in ``timeout`` seconds.
        """

    @property
    def broken(self) -> MControllerError | None:
        """The failure because of which calls raise GroupBroken; None if there is none."""

    def fail(self, error: GroupError) -> object:
        """Break the group because of a failure that was found elsewhere: until ``restart``, calls raise GroupBroken."""
        ...

    def restart(self, timeout: float | None = None) -> None:
        """End all ranks, and construct the workers again from their init arguments, in other processes.

        Args:
            timeout: deadline in seconds, for ranks that are separate processes; None for none.
        """

    def shutdown(self, timeout: float | None = None) -> None:
        """Call ``finish`` on idle ranks, end all ranks and free their resources. A second call does nothing.

        Args:
            timeout: deadline of ``finish`` in seconds, for ranks that are separate processes; None for none.
        """


def resolve(arguments: Arguments, fetch: Fetch) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments with every ``Deferred`` replaced by its value."""
    args = [value.resolve(fetch) if isinstance(value, Deferred) else value for value in arguments.args]
    named = arguments.kwargs.items()
    return args, {name: value.resolve(fetch) if isinstance(value, Deferred) else value for name, value in named}


def call_context(worker: Any, method: str) -> AbstractContextManager[Any]:
    """Return the context in which a worker wants its method to run; workers need not derive from ``Worker``."""
    enter = getattr(worker, "call_context", None)
    return nullcontext() if enter is None else enter(method)


def countdown(timeout: float | None) -> Callable[[], float | None]:
    """Return a function that returns how many of ``timeout`` seconds are left; None stays None."""
    if timeout is None:
        return lambda: None
    end = time.monotonic() + timeout
    return lambda: max(0.0, end - time.monotonic())


def complete(value: Any) -> Any:
    """Return the value of a method; await it first if the method is async."""
    return _run(value) if hasattr(type(value), "__await__") else value


def stored_value(value: Any) -> Any:
    """Return the value of a reference of Ray, which Ray reads before a call as well; any other value unchanged.

    Waits for a task that has not returned yet. References inside other values stay references, as in Ray.
    """
    ray = sys.modules.get("ray")  # a process without it has no references
    return ray.get(value) if ray is not None and isinstance(value, ray.ObjectRef) else value


def outline(value: Any) -> tuple[list[str], Any] | None:
    """Return the names of a DataProto's tensors, and the DataProto without them; None for any other value."""
    protocol = sys.modules.get("mcontroller.data.batch")  # a process without it has made no DataProto
    if protocol is None or not isinstance(value, protocol.DataProto):
        return None
    return value.tensor_names, value.select([])


def finish(worker: Any) -> None:
    """Call the ``before_shutdown`` of a worker object, if its class has one."""
    before_shutdown = getattr(worker, "before_shutdown", None)
    if before_shutdown is not None:
        before_shutdown()


def reported_coordinates(worker: Any) -> dict[str, int]:
    """Return the coordinates that a worker reports for its own rank, for errors before they have been collected.

    Empty for a worker without ``get_megatron_rank_info``, and if that raises: the error that is being reported may
    have left Megatron unusable, and must not be replaced by another.
    """
    report = getattr(worker, "get_megatron_rank_info", None)
    if report is None:
        return {}
    try:
        info = report()
    except Exception:
        return {}
    return {**{axis: getattr(info, f"{axis}_rank") for axis in DENSE_AXES}, **info.extra}


def _run(awaitable: Any) -> Any:
    """Run on the event loop of the call before, so that a worker's open connections stay bound to a live loop.

    A method of a group in this process that an async method calls has another one: the first is running.
    """

    async def awaited() -> Any:
        return await awaitable

    runner = _idle_runners.pop() if _idle_runners else asyncio.Runner()
    try:
        if not _is_in_event_loop():
            return runner.run(awaited())
        with ThreadPoolExecutor(1) as thread:  # the loop is the caller's, as in a notebook
            return thread.submit(runner.run, awaited()).result()
    finally:
        _idle_runners.append(runner)


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def rejection(role: str, method: str, errors: Mapping[int, WorkerError]) -> CallRejected:
    """Return the error of a call that every rank has rejected, from the error of each."""
    first = errors[min(errors)]
    causes = {error.cause for error in errors.values()}
    others = f" (on rank {first.rank}; other ranks have other reasons)" if len(causes) > 1 else ""
    text = f"{role}.{method} was rejected by every rank before it changed anything: {first.cause}{others}"
    return CallRejected(text, **{**first.fields, "followers": len(errors) - 1})
