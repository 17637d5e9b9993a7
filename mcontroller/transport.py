"""The seam between a group and the transport that carries its calls.

A group turns one call into a list of ``RankCall``; an ``Executor`` (in this process, or over Ray) runs them and gives
a ``Pending`` back. Nothing above this file knows how values travel, and nothing below it knows what they mean:

* ranks that get equal arguments are given the *same* ``Arguments`` object, so that a transport serializes and stores
  each of them once, whatever the number of its readers;
* a value that stands in several ``Arguments`` (a plain argument beside split batches) goes through ``share`` first;
* an argument that is still on the workers is a ``Deferred``: it holds handles, and ``run_method`` makes it into its
  value on the rank that needs it, so that it never visits the controller;
* a call with ``ship=False`` drops its value where it was made, before anything is serialized.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

__all__ = [
    "Arguments",
    "Deferred",
    "Executor",
    "Fetch",
    "Handle",
    "Outcome",
    "Pending",
    "RankCall",
    "finish",
    "run_method",
]

Handle = Any
"""What a transport gives for a value that it keeps: a ``ray.ObjectRef``, or a holder in this process."""

Fetch = Callable[[Sequence[Handle]], list[Any]]
"""Gives the values of several handles at once. Each is private to the caller, who may write into it."""


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """What a method is called with on one or more ranks; compared by identity."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return Arguments, (self.args, self.kwargs)


@dataclass(frozen=True, slots=True)
class RankCall:
    """One rank's part in a call; its value comes back only where ``ship`` is true."""

    rank: int
    arguments: Arguments
    ship: bool


class Deferred(ABC):
    """An argument that stands for a value held elsewhere. It may stand only at the top level of ``Arguments``."""

    @abstractmethod
    def handles(self) -> Sequence[Handle]:
        """Every handle that ``resolve`` may fetch: what a transport has to keep alive, and may prefetch."""

    @abstractmethod
    def resolve(self, fetch: Fetch) -> Any:
        """The value itself, of which no more than needed is fetched."""


class Pending(Protocol):
    """A call on its way. ``parts`` and ``lengths`` have one entry per call with ``ship=True``, in call order."""

    @property
    def parts(self) -> Sequence[Handle]:
        """Handles of the values; asking for them does not wait and fetches nothing."""

    @property
    def lengths(self) -> Sequence[Handle]:
        """Handles of each value's row count (``Outcome.rows``); empty unless submitted with ``measure=True``."""

    def result(self, timeout: float | None = None, *, joined: bool = False) -> list[Any]:
        """Waits for *every* rank, shipped or not, and gives the shipped values.

        ``joined`` says that batches among them will be joined, which copies them: a transport may leave that to it.
        ``timeout`` (seconds from now) can only shorten the deadline that the call was submitted with.
        Raises WorkerError, WorkerDied, CallTimeout or GroupBroken; a second call gives or raises the same.
        """

    def check(self, timeout: float | None = None) -> None:
        """Waits as ``result`` does and raises what it raises, and fetches no value."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for every rank; whether all have answered or failed in time. Never raises what a rank raised."""

    def done(self) -> bool:
        """Whether every rank has answered or failed; does not wait."""

    def cancel(self) -> None:
        """Gives the call up, and ``result`` raises; no rank runs it, unless one has begun: then all do."""


class Executor(Protocol):
    """The ranks of one role, reachable. A process that hosts several roles has one executor for each of them."""

    @property
    def transport(self) -> str:
        """Names the kind of its handles: executors of one transport can fetch each other's."""

    @property
    def world_size(self) -> int: ...

    @property
    def nodes(self) -> Sequence[str]:
        """The node of every rank, by rank."""

    def set_coordinates(self, coordinates: Sequence[Mapping[str, int]]) -> None:
        """Tells where each rank stands, as soon as the group knows it, for errors and traces to say."""

    def share(self, value: Any, readers: int) -> Any:
        """What stands for ``value`` in several ``Arguments`` that ``readers`` ranks read between them.

        The value itself where it is small or read once; otherwise a ``Deferred`` on a copy that is stored once.
        """

    def submit(
        self, method: str, calls: Sequence[RankCall], *, timeout: float | None = None, measure: bool = False
    ) -> Pending:
        """Starts ``method`` on the ranks of ``calls``, each rank at most once, and does not wait.

        ``timeout`` is the call's deadline in seconds, None for none. ``measure`` asks for ``Pending.lengths``.
        Calls submitted one after another run in that order on every rank. Raises GroupBroken if a call before
        has failed; the failure of this one is raised by ``Pending.result``.
        """

    def fetch(self, handles: Sequence[Handle]) -> list[Any]:
        """The values of handles of this transport, brought to the calling process; see ``Fetch``."""

    def shutdown(self) -> None:
        """Has idle ranks ``finish``, ends them and frees all that they hold; a second call does nothing."""


class Outcome(NamedTuple):
    """What one rank's run gives its transport: two objects, so that the count can be read without the value."""

    value: Any
    rows: int | None


def run_method(
    worker: Any, method: str, arguments: Arguments, *, fetch: Fetch, ship: bool = True, measure: bool = False
) -> Outcome:
    """Runs ``method`` of a worker object where the object lives, sync or async, and gives what is to be sent back.

    Deferred arguments are resolved first. ``Outcome.value`` is None with ``ship=False``; ``Outcome.rows`` is the
    number of rows of a DataProto when ``measure`` asks for it, None for any other value. What the method raises
    passes through.
    """

    def read(value: Any) -> Any:
        return value.resolve(fetch) if isinstance(value, Deferred) else value

    kwargs = {name: read(value) for name, value in arguments.kwargs.items()}
    call_context = getattr(worker, "call_context", None)  # workers need not derive from Worker
    with nullcontext() if call_context is None else call_context(method):
        value = getattr(worker, method)(*map(read, arguments.args), **kwargs)
        if inspect.isawaitable(value):
            value = _finish(value)
    if not ship:
        return Outcome(None, None)
    return Outcome(value, _rows(value) if measure else None)


def finish(worker: Any) -> None:
    """Runs the ``before_shutdown`` of a worker object, where its class has one."""
    before_shutdown = getattr(worker, "before_shutdown", None)
    if before_shutdown is not None:
        before_shutdown()


_runner: asyncio.Runner | None = None


def _finish(awaitable: Any) -> Any:
    """Runs to its end on one event loop per process, so that what a worker keeps open stays bound to a live loop."""
    global _runner
    if _runner is None:
        _runner = asyncio.Runner()

    async def finish() -> Any:
        return await awaitable

    return _runner.run(finish())


def _rows(value: Any) -> int | None:
    protocol = sys.modules.get(
        "mcontroller.data.protocol"
    )  # a process without it, and without torch, has made no DataProto
    return len(value) if protocol is not None and isinstance(value, protocol.DataProto) else None
