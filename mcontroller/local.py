"""Groups in the calling process: the same interface without Ray, for breakpoints, tests and thousands of ranks.

The ranks run one after another in the caller's thread. What goes to a rank or back is copied, as if the ranks were
separate processes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

import torch

from mcontroller.data.columns import is_tensordict
from mcontroller.data.pickling import reduce
from mcontroller.errors import (
    CallTimeout,
    DataError,
    DispatchError,
    GroupBroken,
    GroupError,
    LayoutError,
    MControllerError,
    WorkerError,
    before_changes,
    is_before_changes,
)
from mcontroller.group import WorkerGroup
from mcontroller.trace.recorder import on_rank, start_timer
from mcontroller.transport import (
    Arguments,
    Handle,
    call_context,
    complete,
    finish,
    outline,
    rejection,
    reported_coordinates,
    resolve,
)
from mcontroller.worker import ClassWithInitArgs, RankEnvironment, W_co
from parallel_state.axes import is_count
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology

T = TypeVar("T")


class LocalWorkerGroup(WorkerGroup[W_co]):
    """A group for debuggers: the ranks run one after another in the caller's thread.

    Ranks that communicate cannot run one after another: such workers need a group of one rank, or
    ``mcontroller.testing``, or Ray.

    Args:
        cls_with_init: the worker class, or a ClassWithInitArgs with its init arguments.
        layout: the number of ranks, or a ParallelLayout, which sets the coordinates of the ranks. If the workers
            report their own coordinates, these must fit the layout.
        name_prefix: the role, as error messages name it.
        timeout: accepted for the interface of other groups; calls in the caller's thread have no deadline.

    Raises:
        LayoutError: ``layout`` is of another type.
        WorkerError: a worker's constructor raised.
    """

    executor: LocalExecutor

    def __init__(
        self,
        cls_with_init: type[W_co] | ClassWithInitArgs[W_co],
        layout: int | ParallelLayout = 1,
        *,
        name_prefix: str = "local",
        timeout: float | None = None,
    ) -> None:
        init = cls_with_init if isinstance(cls_with_init, ClassWithInitArgs) else ClassWithInitArgs(cls_with_init)
        if not isinstance(layout, ParallelLayout) and not is_count(layout):
            raise LayoutError(f"layout is {layout!r}; expected a ParallelLayout or a number of ranks, at least 1")
        declared = layout if isinstance(layout, ParallelLayout) else None
        world_size = layout.world_size if isinstance(layout, ParallelLayout) else layout
        executor = LocalExecutor(init, world_size, name_prefix)
        reports = hasattr(init.cls, "get_megatron_rank_info")
        topology = Topology.from_layout(declared, executor.nodes) if declared and not reports else None
        super().__init__(init.cls, executor, name_prefix, timeout=timeout, topology=topology, declared=declared)

    @property
    def workers(self) -> list[W_co]:
        """The worker objects, by rank."""
        return self.executor.workers


class LocalHandle:
    """A value as it was when the method returned; each reader gets a copy.

    Args:
        value: the value.
        name: of the value, in the error of a reader if it cannot be sent.
    """

    __slots__ = ("__weakref__", "copy")

    def __init__(self, value: Any, name: str) -> None:
        try:
            self.copy = copies(value, name)
        except MControllerError as error:
            self.copy = functools.partial(_raise, error)


def _raise(error: MControllerError) -> NoReturn:
    raise error


class LocalCall:
    """A call that has run, with its values or the error that ended it; see ``mcontroller.transport.InFlightCall``."""

    is_read = False

    def __init__(
        self,
        values: Sequence[Any] = (),
        name: str = "",
        keep: bool = False,
        error: MControllerError | None = None,
        number: int = -1,
    ) -> None:
        self.number = number
        self.parts = [LocalHandle(value, name) for value in values]
        self.outlines = [LocalHandle(outline(value), name) for value in values] if keep else []
        self._error = error

    def result(self, timeout: float | None = None) -> list[Any]:
        """Return copies of the values, or raise the error of the call."""
        self.check()
        return [part.copy() for part in self.parts]

    def check(self, timeout: float | None = None) -> None:
        """Raise the error of the call, if it failed."""
        if self._error is not None:
            raise self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Return True: the call ran when it was submitted."""
        return True

    def done(self) -> bool:
        """Return True: the call ran when it was submitted."""
        return True

    def cancel(self) -> None:
        """Do nothing: the call ran when it was submitted."""


@dataclass(frozen=True)
class _Rejected:
    """An error that a rank raised before it changed anything."""

    error: Exception


@contextlib.contextmanager
def _no_rendezvous(world_size: int) -> Iterator[None]:
    """Have torch.distributed reject a process group of several ranks: the first would wait for the others for ever."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or world_size == 1:
        yield
        return

    def rejected(*_: Any, **__: Any) -> NoReturn:
        raise DispatchError(
            f"the {world_size} ranks of a LocalWorkerGroup run one after another, and cannot form a process group: use "
            "mcontroller.testing.simulated_worker_group for ranks that communicate in one process, or RayWorkerGroup",
            world_size=world_size,
        )

    rendezvous = distributed.rendezvous
    distributed.rendezvous = rejected
    try:
        yield
    finally:
        distributed.rendezvous = rendezvous


class LocalExecutor:
    """The ranks of one role as objects of this process; see ``mcontroller.transport.Executor``.

    A call runs when it is submitted, rank after rank, in the caller's thread: ``breakpoint()`` in a method works.
    Deadlines do not apply. The first exception ends the call and breaks the group, as over Ray.

    Attributes:
        role: name of the role in error messages.
        world_size: number of ranks.
        nodes: this machine's name, for every rank.
        threads: None for every rank: they compute on the threads of this process.
        coordinates: index on each axis, by rank; empty until ``set_coordinates``.
        workers: the worker objects, by rank.
        broken: the failure because of which calls raise GroupBroken; None if there is none.
    """

    transport = "local"

    def __init__(self, cls_with_init: ClassWithInitArgs[Any], world_size: int, role: str) -> None:
        self.role = role
        self.world_size = world_size
        self.nodes: Sequence[str] = (socket.gethostname(),) * world_size
        self.threads: Sequence[int | None] = (None,) * world_size
        self.coordinates: Sequence[Mapping[str, int]] = ()
        self.broken: MControllerError | None = None
        self.workers: list[Any] = []
        self._init = cls_with_init
        self._number = -1
        self._construct()

    def restart(self, timeout: float | None = None) -> None:
        """Construct the workers again, in place of the present ones.

        Raises:
            WorkerError: a worker's constructor raised.
        """
        self._construct()

    def _construct(self) -> None:
        made: dict[int, Any] = {}
        init = copies((self._init.args, self._init.kwargs), f"an init argument of {self.role}")

        def construct(rank: int) -> None:
            args, kwargs = init()
            made[rank] = self._init.cls(*args, **kwargs)

        self.workers = []
        self.on_ranks("__init__", {rank: functools.partial(construct, rank) for rank in range(self.world_size)})
        self.workers = [made[rank] for rank in range(self.world_size)]
        self.broken, self._closed = None, False

    def on_ranks(self, method: str, functions: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """Run a function on each rank, one after another, and return the values by rank.

        Args:
            method: the method that they run, for error messages.
            functions: by rank.

        Raises:
            MControllerError: the first rank that failed; the ranks after it do not run.
        """
        values = {}
        for rank, function in functions.items():
            try:
                with self.as_rank(rank):
                    values[rank] = function()
            except GroupError:
                raise
            except (Exception, SystemExit) as error:
                raise self.error_of(rank, method, error) from error
            except BaseException as error:  # KeyboardInterrupt: the other ranks have not run
                text = f"{self.role}.{method} ended with {type(error).__name__} on rank {rank}"
                self.fail(GroupError(text, role=self.role, rank=rank))
                raise
        return values

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Set this process's environment variables to a rank's while the block runs."""
        with RankEnvironment(rank, self.world_size, rank, self.world_size).activate(), _no_rendezvous(self.world_size):
            yield

    def set_coordinates(self, coordinates: Sequence[Mapping[str, int]]) -> None:
        """Set the coordinates of each rank, by rank, for error messages."""
        self.coordinates = coordinates

    def share(self, value: Any, readers: int) -> Any:
        """Return the value itself: each rank copies its arguments when it runs."""
        return value

    def submit(
        self,
        method: str,
        arguments: Mapping[int, Arguments],
        returning: Sequence[int],
        *,
        timeout: float | None = None,
        keep: bool = False,
    ) -> LocalCall:
        """Run ``method`` on the ranks, one after another; see ``mcontroller.transport.Executor.submit``."""
        self.check_alive(method)
        late = self.late_error(method, tuple(arguments), timeout)
        if late is not None:
            return self.fail(late)
        self._number += 1
        packed = {
            id(shard): copies(shard, f"{self.role}.{method}: an argument")
            for shard in {id(shard): shard for shard in arguments.values()}.values()
        }
        functions = {
            rank: functools.partial(self._try, rank, method, packed[id(shard)]) for rank, shard in arguments.items()
        }
        try:
            values = self.on_ranks(method, functions)
        except MControllerError as error:
            return self.fail(error)
        rejected = {rank: value.error for rank, value in values.items() if isinstance(value, _Rejected)}
        if rejected:
            errors = {rank: self.error_of(rank, method, error) for rank, error in rejected.items()}
            if len(rejected) < len(values):
                return self.fail(errors[min(errors)])
            return LocalCall(error=rejection(self.role, method, errors))
        results, name = [values.get(rank) for rank in returning], f"a result of {self.role}.{method}"
        return LocalCall(results, name, keep, number=self._number)

    def late_error(self, method: str, ranks: Sequence[int], timeout: float | None) -> CallTimeout | None:
        """Return the error of a call that would miss its deadline; None, because calls here have no deadline."""
        return None

    def _try(self, rank: int, method: str, arguments: Callable[[], Arguments]) -> Any:
        """Run ``method`` on one rank; return a ``_Rejected`` if it raises before it has changed anything."""
        try:
            return self.run(rank, method, arguments)
        except Exception as error:
            if is_before_changes(error):
                return _Rejected(error)
            raise

    def run(self, rank: int, method: str, arguments: Callable[[], Arguments]) -> Any:
        """Run ``method`` on one rank with copies of the arguments, which ``arguments`` returns; return its value."""
        worker = self.workers[rank]
        with on_rank(self.role, rank, self.coordinates[rank] if self.coordinates else {}):
            timer = start_timer(number=self._number)
            with before_changes():
                args, kwargs = resolve(arguments(), self.fetch)
            timer("fetch")
            try:
                with call_context(worker, method):
                    return complete(getattr(worker, method)(*args, **kwargs))
            finally:
                timer(f"{self.role}.{method}")

    def fetch(self, handles: Sequence[Handle], timeout: float | None = None) -> list[Any]:
        """Return copies of the values of handles, at once."""
        return [handle.copy() for handle in handles]

    def fail(self, error: MControllerError) -> LocalCall:
        """Break the group with ``error``, and return the call that raises it."""
        self.broken = error
        return LocalCall(error=error)

    def shutdown(self, timeout: float | None = None) -> None:
        """Call ``before_shutdown`` of every worker, unless the group is broken, and drop the workers.

        Raises:
            WorkerError: a worker's ``before_shutdown`` raised; the ranks after it are not called.
        """
        workers = [] if self.broken is not None else self.workers
        self._closed = True
        self.workers = []
        if workers:
            calls = {rank: functools.partial(finish, worker) for rank, worker in enumerate(workers)}
            self.on_ranks("before_shutdown", calls)

    def check_alive(self, method: str) -> None:
        """Raise GroupBroken if an earlier call has failed or the group was shut down."""
        if self._closed:
            raise GroupBroken(f"{self.role}.{method}: the group was shut down", role=self.role, first_cause=None)
        if self.broken is not None:
            cause = str(self.broken).partition("\n")[0]
            raise GroupBroken(
                f"{self.role}.{method}: the group was broken by an earlier failure: {cause}; restart it",
                role=self.role,
                first_cause=self.broken,
            )

    def error_of(self, rank: int, method: str, error: BaseException) -> WorkerError:
        """Return the error of a call from what a rank raised."""
        coordinates = dict(self.coordinates[rank]) if self.coordinates else self._reported(rank)
        axes = " ".join(f"{axis}={index}" for axis, index in coordinates.items())
        cause = f"{type(error).__name__}: {error}"
        failure = WorkerError(
            f"{self.role} rank {rank}{f' ({axes})' if axes else ''} failed in {method}: {cause}",
            role=self.role,
            rank=rank,
            coordinates=coordinates,
            node=self.nodes[rank],
            pid=os.getpid(),
            method=method,
            cause=cause,
            worker_traceback="".join(traceback.format_exception(error)),
            followers=0,
        )
        failure.__cause__ = error
        return failure

    def _reported(self, rank: int) -> dict[str, int]:
        if rank >= len(self.workers):  # its constructor failed
            return {}
        with self.as_rank(rank):
            return reported_coordinates(self.workers[rank])


# ---- values that go to a rank or back, as if they were separate processes --------------------------------------------


_SHARED = (type, FunctionType, ModuleType, LocalHandle)
"""What ranks in one process share: code, and values that are copied when they are fetched."""

_shared_by_id: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _shared(number: int) -> Any:
    return _shared_by_id[number]


class _Pickler(pickle.Pickler):
    """Pickles tensors as they are sent to another process, and refers by id to what ranks share, in ``shared``."""

    def __init__(self, sink: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(sink, protocol=5, buffer_callback=buffers.append)
        self.shared: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) or is_tensordict(obj):
            return reduce(obj)
        if not isinstance(obj, _SHARED) or obj is _shared:
            return NotImplemented
        _shared_by_id[id(obj)] = obj
        self.shared.append(obj)
        return _shared, (id(obj),)


def private_copy(value: Any) -> Any:
    """Return a copy of a value as another process would receive it, which shares no memory with it; see ``copies``."""
    return copies(value, "a value")()


def copies(value: Any, name: str) -> Callable[[], Any]:
    """Return a function that returns copies of a value as it is now; it is pickled once.

    Raises:
        DataError: a process could not send the value, which the error calls ``name``.
    """
    sink, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = _Pickler(sink, buffers)
    try:
        pickler.dump(value)
    except DataError as error:
        raise DataError(f"{name}: {error}", **error.fields) from error
    except MControllerError:
        raise
    except Exception as error:
        raise DataError(f"{name} cannot be sent: {type(error).__name__}: {error}", location=name) from error
    contents = [bytes(buffer.raw()) for buffer in buffers]
    return functools.partial(_unpickled, sink.getvalue(), contents, pickler.shared)


def _unpickled(data: bytes, contents: Sequence[bytes], shared: Sequence[Any]) -> Any:
    """Return the value; ``shared`` keeps alive what the pickle refers to by id."""
    return pickle.loads(data, buffers=map(bytearray, contents))
