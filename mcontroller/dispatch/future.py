"""Futures: the results of calls that the caller did not wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn

from typing_extensions import TypeVar

from mcontroller.data.protocol import DataProto
from mcontroller.dispatch.remote_batch import JoinedBatch, RemoteBatch, Window
from mcontroller.errors import DispatchError
from mcontroller.transport import Deferred, Fetch, Handle, InFlightCall, countdown

__all__ = ["DataProtoFuture", "Future", "LazyBatch"]

T_co = TypeVar("T_co", covariant=True, default=Any)


class _FutureType(type):
    """The metaclass of futures. Ray names the type of a value that it cannot wait for: the name contains the fix."""

    def __repr__(cls) -> str:
        return f"<class '{cls.__module__}.{cls.__qualname__}', whose result is returned by .get()>"


class Future(Generic[T_co], metaclass=_FutureType):
    """The result of a call with ``blocking=False``, before it has arrived.

    It is no list of Ray's references: ``len``, indexing, ``ray.get`` and ``ray.wait`` raise an error that names
    ``get``.

    Args:
        calls: the calls that the result depends on.
        collect: called with a timeout in seconds, or None; waits for the calls and returns the result.
    """

    def __init__(self, calls: Sequence[InFlightCall], collect: Callable[[float | None], T_co]) -> None:
        self._calls = tuple(calls)
        self._collect = collect

    @property
    def parts(self) -> list[Any]:
        """The transport's handles of the returned values, in the order of the results."""
        return [part for call in self._calls for part in call.parts]

    def get(self, timeout: float | None = None) -> T_co:
        """Wait for the result and return it, or raise the error of the call, as a blocking call does.

        Args:
            timeout: seconds from now; a later result raises CallTimeout and breaks the group. None waits until the
                call's own deadline.

        Raises:
            WorkerError: a rank's method raised.
            WorkerDied: the process of a rank ended.
            CallTimeout: the result did not arrive in time.
            GroupBroken: an earlier call of the group failed.
            GroupError: the call was cancelled, or its group shut down.
        """
        return self._collect(timeout)

    def check(self, timeout: float | None = None) -> None:
        """Wait and raise as ``get`` does, but fetch nothing: the values stay on the workers."""
        left = countdown(timeout)
        for call in self._calls:
            call.check(left())

    def done(self) -> bool:
        """Whether every rank has answered or failed. Does not wait."""
        return all(call.done() for call in self._calls)

    ready = done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every rank has answered or failed; return whether that happened within ``timeout`` seconds."""
        left = countdown(timeout)
        return all(call.wait(left()) for call in self._calls)

    def cancel(self) -> None:
        """Cancel the call on all ranks, or on none if one of them has started it.

        Unless the result was read before, ``get`` then raises GroupError, whether the call was cancelled or not. Calls
        of a LocalWorkerGroup have run already: cancelling them does nothing.
        """
        for call in self._calls:
            call.cancel()

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


class DataProtoFuture(Future[DataProto]):
    """The future of a DataProto. Passed to a call of another group, its rows go from worker to worker.

    If the consumer has as many shards as the future has parts, each shard gets one part, unchanged. Otherwise every
    rank of the consumer fetches only the parts that overlap its rows.

    Args:
        rows: the rows on the workers.
        fetch: reads the handles of the transport.
        calls: the calls that the rows depend on.
        transport: name of the transport of the handles; groups of another transport get the fetched result.
        collect: as for ``Future``; None fetches ``rows``.
    """

    def __init__(
        self,
        rows: Deferred,
        fetch: Fetch,
        calls: Sequence[InFlightCall] = (),
        *,
        transport: str = "",
        collect: Callable[[float | None], Any] | None = None,
    ) -> None:
        super().__init__(calls, collect or self._assemble)
        self.rows = rows
        self.transport = transport
        self.fetch = fetch

    def _assemble(self, timeout: float | None) -> Any:
        left = countdown(timeout)
        self.check(left())
        return self.rows.resolve(_within(self.fetch, left))

    @property
    def futures(self) -> list[Future[Any]]:
        """The future of the value of each returning rank, in the order of the results."""

        def read(part: Handle) -> Callable[[float | None], Any]:
            def collect(timeout: float | None) -> Any:
                left = countdown(timeout)
                self.check(left())
                return self.fetch([part], left())[0]

            return collect

        return [Future(self._calls, read(part)) for part in self.parts]

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Return futures of ``chunks`` consecutive parts of the rows, split as by ``DataProto.chunk``. Does not wait.

        Raises:
            DispatchError: ``chunks`` is less than 1.
        """
        if chunks < 1:
            raise DispatchError(f"chunks is {chunks!r}; expected at least 1", chunks=chunks)
        rows = self._as_rows("chunk")
        return [self._of(Window(rows, index, chunks), self._calls) for index in range(chunks)]

    @staticmethod
    def concat(data: Sequence[DataProtoFuture]) -> DataProtoFuture:
        """Return the future of the rows of several futures, one after another. Does not wait.

        Raises:
            DispatchError: ``data`` is empty, or its futures are of groups with different transports.
        """
        if not data or len({future.transport for future in data}) > 1:
            raise DispatchError(
                f"cannot join {len(data)} futures of transports {sorted({future.transport for future in data})}: pass "
                "at least one, all of groups with the same transport"
            )
        rows = JoinedBatch(tuple(future._as_rows("concat") for future in data))
        calls = dict.fromkeys(call for future in data for call in future._calls)
        return data[0]._of(rows, tuple(calls))

    def _of(self, rows: RemoteBatch, calls: Sequence[InFlightCall]) -> DataProtoFuture:
        return DataProtoFuture(rows, self.fetch, calls, transport=self.transport)

    def _as_rows(self, operation: str) -> RemoteBatch:
        if not isinstance(self.rows, RemoteBatch):
            raise DispatchError(f"a future inside a worker's method has no {operation}(): call get() first")
        return self.rows


@dataclass(frozen=True)
class LazyBatch(Deferred):
    """An argument that becomes a DataProtoFuture on the rank (``register(..., materialize_futures=False)``)."""

    rows: Deferred

    def handles(self) -> Sequence[Handle]:
        """Return the handles of the rows."""
        return self.rows.handles()

    def resolve(self, fetch: Fetch) -> DataProtoFuture:
        """Return the future; its ``get`` fetches the rows."""
        return DataProtoFuture(self.rows, fetch)


def _within(fetch: Fetch, left: Callable[[], float | None]) -> Fetch:
    """Return ``fetch`` with what is ``left`` of a deadline."""
    return lambda handles, timeout=None: fetch(handles, left())
