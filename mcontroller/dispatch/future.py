"""Futures: results of calls that were sent and not waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn

from typing_extensions import TypeVar

from mcontroller.data.protocol import DataProto
from mcontroller.dispatch.remote_batch import JoinedBatch, RemoteBatch, Window
from mcontroller.errors import DispatchError
from mcontroller.transport import Deferred, Fetch, Handle, Pending

__all__ = ["DataProtoFuture", "Future", "LazyBatch"]

T_co = TypeVar("T_co", covariant=True, default=Any)


class Future(Generic[T_co]):
    """What a call with ``blocking=False`` gives: wait for it, poll it, cancel it, get its result."""

    def __init__(self, pendings: Sequence[Pending], collect: Callable[[float | None], T_co]) -> None:
        self._pendings = tuple(pendings)
        self._collect = collect

    @property
    def parts(self) -> list[Any]:
        """The transport's handles of the values that come back, in rank order (over Ray: object references)."""
        return [part for pending in self._pendings for part in pending.parts]

    def get(self, timeout: float | None = None) -> T_co:
        """Waits, ``timeout`` seconds at most, and gives what the blocking call would have given or raises its error."""
        return self._collect(timeout)

    def done(self) -> bool:
        """Whether every rank has answered or failed; does not wait."""
        return all(pending.done() for pending in self._pendings)

    ready = done

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until every rank has answered or failed; whether that came within ``timeout`` seconds."""
        left = _countdown(timeout)
        return all(pending.wait(left()) for pending in self._pendings)

    def cancel(self) -> None:
        """Gives the call up, and ``get`` raises; no rank runs it, unless one has begun: then all do."""
        for pending in self._pendings:
            pending.cancel()

    def __reduce__(self) -> NoReturn:
        raise DispatchError(
            f"a {type(self).__name__} cannot be sent inside another value: pass it as an argument by itself, or its "
            "result (get())"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'done' if self.done() else 'running'})"


class DataProtoFuture(Future[DataProto]):
    """The future of a DataProto. Passed into another group's call it goes straight from worker to worker.

    A consumer with as many shards as the future has parts gets each part as it is, one on each shard, and no rank
    fetches another's; otherwise every consumer fetches only those parts that overlap its rows. ``rows`` says which.
    """

    def __init__(
        self,
        rows: Deferred,
        fetch: Fetch,
        pendings: Sequence[Pending] = (),
        *,
        transport: str = "",
        collect: Callable[[float | None], Any] | None = None,
    ) -> None:
        super().__init__(pendings, collect or self._assemble)
        self.rows = rows
        self.transport = transport
        self._fetch = fetch

    def _assemble(self, timeout: float | None) -> Any:
        left = _countdown(timeout)
        for pending in self._pendings:
            pending.check(left())
        return self.rows.resolve(self._fetch)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Futures of ``chunks`` consecutive parts of the rows, split as ``DataProto.chunk`` does; waits for nothing."""
        if chunks < 1:
            raise DispatchError(f"a future cannot be split into {chunks} chunks: give at least 1", chunks=chunks)
        rows = self._as_rows("chunk")
        return [self._of(Window(rows, index, chunks), self._pendings) for index in range(chunks)]

    @staticmethod
    def concat(data: Sequence[DataProtoFuture]) -> DataProtoFuture:
        """The future of the rows of several, one after another; waits for nothing."""
        if not data or len({future.transport for future in data}) > 1:
            raise DispatchError(
                f"cannot join {len(data)} futures of transports {sorted({future.transport for future in data})}: give "
                "at least one, all of groups of one transport"
            )
        rows = JoinedBatch(tuple(future._as_rows("concat") for future in data))
        pendings = dict.fromkeys(pending for future in data for pending in future._pendings)
        return data[0]._of(rows, tuple(pendings))

    def _of(self, rows: RemoteBatch, pendings: Sequence[Pending]) -> DataProtoFuture:
        return DataProtoFuture(rows, self._fetch, pendings, transport=self.transport)

    def _as_rows(self, operation: str) -> RemoteBatch:
        if not isinstance(self.rows, RemoteBatch):
            raise DispatchError(f"a future inside a worker's method has no {operation}: get() it first")
        return self.rows


@dataclass(frozen=True)
class LazyBatch(Deferred):
    """An argument that a method gets as a DataProtoFuture (``register(..., materialize_futures=False)``)."""

    rows: Deferred

    def handles(self) -> Sequence[Handle]:
        return self.rows.handles()

    def resolve(self, fetch: Fetch) -> DataProtoFuture:
        return DataProtoFuture(self.rows, fetch)


def _countdown(timeout: float | None) -> Callable[[], float | None]:
    """What is left of ``timeout`` seconds at each call; None stays None."""
    if timeout is None:
        return lambda: None
    end = time.monotonic() + timeout
    return lambda: max(0.0, end - time.monotonic())
