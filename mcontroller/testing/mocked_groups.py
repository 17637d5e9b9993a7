"""Mocked worker groups: unit tests of topology-aware workers in one process, without Ray or a GPU.

``mock_worker_group`` returns a real group, with the real dispatch and collect, whose ranks are objects in the calling
process. Inside a worker's methods, ``torch.distributed.get_rank()`` and the getters of Megatron's ``parallel_state``
return what they would return on that rank. Ranks run one after another and cannot communicate::

    group = mock_worker_group(MyWorker, ParallelLayout(world_size=8, tp=2, pp=2), config)
    result = group.compute_log_prob(batch)
    assert [call.method for call in group.calls[3]] == ["compute_log_prob"]

Failures are injected by rank, to test how the code that drives the group handles them::

    group = mock_worker_group(MyWorker, layout, failures={3: raises(ValueError("nan")), 5: dies(), 2: is_late(30)})
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcontroller.config.checks import close_names
from mcontroller.dispatch.registration import registrations
from mcontroller.errors import CallTimeout, DataError, DispatchError, GroupError, WorkerDied, before_changes
from mcontroller.group import WorkerGroup
from mcontroller.local import LocalExecutor, private_copy
from mcontroller.transport import Arguments, resolve
from mcontroller.worker import ClassWithInitArgs, RankEnvironment, W_co
from parallel_state.axes import ranks_text
from parallel_state.layout import ParallelLayout
from parallel_state.mocked import MockedRanks
from parallel_state.topology import Topology

__all__ = [
    "InjectedFailure",
    "MockWorkerGroup",
    "RecordedCall",
    "dies",
    "is_late",
    "mock_worker_group",
    "mocked_rank",
    "raises",
]


@dataclass(frozen=True)
class InjectedFailure:
    """A failure of one rank, made by ``raises``, ``dies`` or ``is_late``.

    Attributes:
        error: the exception that the rank raises.
        exit_cause: the reason of the process's death.
        late_by: seconds by which the answer is late; 0 for none.
        method: the method that fails; None for every method.
    """

    error: Exception | None = None
    exit_cause: str | None = None
    late_by: float = 0.0
    method: str | None = None


_NO_FAILURE = InjectedFailure()


def raises(error: Exception | str, *, method: str | None = None) -> InjectedFailure:
    """Make a rank raise ``error`` (a string becomes a RuntimeError); the caller gets a WorkerError."""
    return InjectedFailure(error=RuntimeError(error) if isinstance(error, str) else error, method=method)


def dies(exit_cause: str = "killed by signal 9 (SIGKILL)", *, method: str | None = None) -> InjectedFailure:
    """Make a rank's process end; the caller gets a WorkerDied with this ``exit_cause``."""
    return InjectedFailure(exit_cause=exit_cause, method=method)


def is_late(seconds: float, *, method: str | None = None) -> InjectedFailure:
    """Make a rank answer late, without any real waiting: a call with a shorter deadline gets a CallTimeout."""
    return InjectedFailure(late_by=seconds, method=method)


@dataclass(frozen=True)
class RecordedCall:
    """One run of a method on one rank.

    Attributes:
        method: the method's name.
        args: copies of the positional arguments as they were at the call.
        kwargs: copies of the keyword arguments as they were at the call.
        result: a copy of the result; the result itself if it cannot be sent, which is an error on returning ranks.
    """

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


class MockExecutor(LocalExecutor):
    """A LocalExecutor whose ranks have coordinates, record their calls, and fail as ``failures`` specifies."""

    def __init__(
        self,
        cls_with_init: ClassWithInitArgs[Any],
        topology: Topology,
        role: str,
        failures: Mapping[int, InjectedFailure],
    ) -> None:
        self.failures = dict(failures)
        self.calls: list[list[RecordedCall]] = [[] for _ in range(topology.world_size)]
        self._ranks = MockedRanks(topology)
        super().__init__(cls_with_init, topology.world_size, role)
        if topology.nodes is not None:
            self.nodes = topology.nodes

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        with super().as_rank(rank), self._ranks.activate(rank):
            yield

    def late_error(self, method: str, ranks: Sequence[int], timeout: float | None) -> CallTimeout | None:
        late = tuple(rank for rank in ranks if timeout is not None and self._failure(rank, method).late_by > timeout)
        if not late:
            return None
        return CallTimeout(
            f"{self.role}.{method}: after {timeout:g} s no answer from {self.role} {ranks_text(late)}",
            role=self.role,
            method=method,
            timeout=timeout,
            ranks=late,
            stacks=dict.fromkeys(late, "(mocked: late)"),
            cause="",
            report="",
        )

    def run(self, rank: int, method: str, arguments: Callable[[], Arguments]) -> Any:
        failure = self._failure(rank, method)
        if failure.error is not None:
            raise failure.error
        if failure.exit_cause is not None:
            raise self._died(rank, method, failure.exit_cause)
        with before_changes():
            args, kwargs = resolve(arguments(), self.fetch)
        value = super().run(rank, method, arguments)
        result = value
        with contextlib.suppress(DataError):
            result = private_copy(value)
        self.calls[rank].append(RecordedCall(method, tuple(args), kwargs, result))
        return value

    def _failure(self, rank: int, method: str) -> InjectedFailure:
        failure = self.failures.get(rank, _NO_FAILURE)
        return failure if failure.method in (None, method) else _NO_FAILURE

    def _died(self, rank: int, method: str, exit_cause: str) -> GroupError:
        return WorkerDied(
            f"{self.role} {ranks_text([rank])} died in {method}: {exit_cause}",
            role=self.role,
            rank=rank,
            coordinates=dict(self.coordinates[rank]) if self.coordinates else {},
            node=self.nodes[rank],
            method=method,
            exit_cause=exit_cause,
            log_tail="",
        )


class MockWorkerGroup(WorkerGroup[W_co]):
    """A group of mocked ranks; see ``mock_worker_group``."""

    executor: MockExecutor

    @property
    def workers(self) -> list[W_co]:
        """The worker objects, by rank."""
        return self.executor.workers

    @property
    def calls(self) -> list[list[RecordedCall]]:
        """The calls that each rank ran, in order, by rank."""
        return self.executor.calls

    @property
    def failures(self) -> dict[int, InjectedFailure]:
        """The injected failures by rank; entries may be added and removed between calls."""
        return self.executor.failures


def mock_worker_group(
    worker: type[W_co] | ClassWithInitArgs[W_co],
    layout: int | ParallelLayout | Topology,
    *args: Any,
    name: str = "mock",
    failures: Mapping[int, InjectedFailure] | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> MockWorkerGroup[W_co]:
    """Make a group of ``worker`` objects on mocked ranks, one per rank of ``layout``.

    Args:
        worker: the worker class, or a ClassWithInitArgs, which allows no other arguments.
        layout: a ParallelLayout; a Topology, whose ranks may be in any order; or a number of ranks, which are then
            data-parallel.
        args: positional arguments of the worker's ``__init__``.
        name: the role, as error messages name it.
        failures: failures by rank: ``raises(...)``, ``dies(...)`` or ``is_late(...)``.
        timeout: deadline in seconds of calls that do not set one; None for no deadline.
        kwargs: keyword arguments of the worker's ``__init__``. One with the name of an argument here, as ``name``,
            needs a ClassWithInitArgs.

    Raises:
        DispatchError: ``failures`` names a rank that the layout does not have or a method that is not called through
            a group, or contains something other than a failure; or there are arguments next to a ClassWithInitArgs.
        TopologyError: ``layout`` is of another type.

    Examples:
        >>> group = mock_worker_group(CriticWorker, ParallelLayout(8, tp=2, pp=2), config, failures={5: dies()})
        >>> with pytest.raises(WorkerDied):
        ...     group.compute_values(batch)
    """
    topology, init = as_topology(layout), init_of(worker, args, kwargs)
    _check_failures(failures or {}, topology.world_size, init.cls)
    executor = MockExecutor(init, topology, name, failures or {})
    return MockWorkerGroup(init.cls, executor, name, timeout=timeout, topology=topology)


def init_of(
    worker: type[W_co] | ClassWithInitArgs[W_co], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ClassWithInitArgs[W_co]:
    """Return a worker class with its arguments; one that has them allows no others.

    Raises:
        DispatchError: there are others.
    """
    if not isinstance(worker, ClassWithInitArgs):
        return ClassWithInitArgs(worker, *args, **kwargs)
    if args or kwargs:
        raise DispatchError(
            f"{worker!r} has its arguments; remove the others: {', '.join([*map(repr, args), *kwargs])}",
            arguments=(*args, *kwargs),
        )
    return worker


def _check_failures(failures: Mapping[int, InjectedFailure], world_size: int, worker_cls: type) -> None:
    outside = [rank for rank in failures if rank not in range(world_size)]
    if outside:
        raise DispatchError(
            f"failures has {ranks_text(outside)}, but the layout has {world_size} ranks",
            ranks=outside,
            world_size=world_size,
        )
    for rank, failure in failures.items():
        if not isinstance(failure, InjectedFailure):
            raise DispatchError(
                f"failures[{rank!r}] is {failure!r}; expected raises(...), dies(...) or is_late(...)", failure=failure
            )
        method = failure.method
        if method is not None and not callable(getattr(worker_cls, method, None)):
            registered = sorted(registrations(worker_cls))
            raise DispatchError(
                f"failures[{rank!r}]: {worker_cls.__name__} has no method {method!r}; it has "
                f"{', '.join(registered)}{close_names(method, registered)}",
                method=method,
            )


@contextlib.contextmanager
def mocked_rank(layout: int | ParallelLayout | Topology, rank: int) -> Iterator[dict[str, int]]:
    """Make Megatron and torch.distributed answer as on one rank of a layout; the context's value is its coordinates.

    Use it to test plain functions that read Megatron's state. RANK, WORLD_SIZE and the other variables that torchrun
    sets are the rank's, on one node.

    Raises:
        TopologyError: ``layout`` is of another type, or has no such rank.

    Examples:
        >>> with mocked_rank(ParallelLayout(8, tp=2, pp=2), rank=5) as coordinates:
        ...     assert parallel_state.get_tensor_model_parallel_rank() == coordinates["tp"]
    """
    topology = as_topology(layout)
    coordinates = topology.coordinates(rank)
    size = topology.world_size
    with RankEnvironment(rank, size, rank, size).activate(), MockedRanks(topology).activate(rank):
        yield coordinates


def as_topology(layout: int | ParallelLayout | Topology) -> Topology:
    """Return the topology of a layout, or of a number of data-parallel ranks.

    Raises:
        TopologyError: ``layout`` is of another type.
    """
    if isinstance(layout, Topology):
        return layout
    return Topology.from_layout(ParallelLayout(world_size=layout) if isinstance(layout, int) else layout)
