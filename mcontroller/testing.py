"""Mocked worker groups: unit tests of topology-aware workers without Ray, without a GPU, in one process.

``mock_worker_group`` gives a real group, with the real dispatch and collect, whose ranks are objects in the calling
process. Inside a worker's methods the rank stands at its coordinates: ``torch.distributed.get_rank()`` and Megatron's
``parallel_state`` getters answer as they would there. Ranks run one after another and cannot communicate.

    group = mock_worker_group(MyWorker, ParallelLayout(world_size=8, tp=2, pp=2), config)
    result = group.compute_log_prob(batch)
    assert [call.method for call in group.calls[3]] == ["compute_log_prob"]

Failures are injected by rank, to see what the code that drives the group does about them:

    group = mock_worker_group(MyWorker, layout, failures={3: raises(ValueError("nan")), 5: dies(), 2: is_late(30)})
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcontroller.errors import CallTimeout, DispatchError, GroupError, LayoutError, WorkerDied
from mcontroller.group import WorkerGroup
from mcontroller.local.copies import private_copy
from mcontroller.local.executor import LocalCall, LocalExecutor
from mcontroller.transport import Arguments, Deferred
from mcontroller.worker import ClassWithInitArgs
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
    """What is to happen on a rank instead of a method's run; ``method`` None: of whichever method is called first."""

    error: Exception | None = None
    exit_cause: str | None = None
    late_by: float | None = None
    method: str | None = None


def raises(error: Exception | str, *, method: str | None = None) -> InjectedFailure:
    """The rank raises this exception (a text: a RuntimeError); the caller gets a WorkerError."""
    return InjectedFailure(error=RuntimeError(error) if isinstance(error, str) else error, method=method)


def dies(exit_cause: str = "killed by signal 9 (SIGKILL)", *, method: str | None = None) -> InjectedFailure:
    """The rank's process ends; the caller gets a WorkerDied with this exit cause."""
    return InjectedFailure(exit_cause=exit_cause, method=method)


def is_late(seconds: float, *, method: str | None = None) -> InjectedFailure:
    """The rank answers that much later, without anybody waiting: a call with a shorter deadline gets a CallTimeout."""
    return InjectedFailure(late_by=seconds, method=method)


@dataclass(frozen=True)
class RecordedCall:
    """One run of a method on one rank: what the rank was given, as it was given it, and what it gave."""

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


class MockExecutor(LocalExecutor):
    """A LocalExecutor whose ranks stand at their coordinates, record their calls, and fail as they are told."""

    def __init__(
        self,
        cls_with_init: ClassWithInitArgs[Any],
        topology: Topology,
        role: str,
        failures: Mapping[int, InjectedFailure],
    ) -> None:
        self.failures = dict(failures)
        self.calls: list[list[RecordedCall]] = [[] for _ in range(topology.world_size)]
        self._given: dict[int, Arguments] = {}
        self._ranks = MockedRanks(topology)
        super().__init__(cls_with_init, topology.world_size, role)
        if topology.nodes is not None:
            self.nodes = topology.nodes

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        with super().as_rank(rank), self._ranks.standing(rank):
            yield

    def submit(
        self,
        method: str,
        arguments: Mapping[int, Arguments],
        returning: Sequence[int],
        *,
        timeout: float | None = None,
        measure: bool = False,
    ) -> LocalCall:
        self.check_alive(method)
        late = [rank for rank in arguments if self._is_late(rank, method, timeout)]
        if late:
            return self.fail(self._timed_out(method, late, timeout))
        distinct = {id(given): given for given in arguments.values()}
        self._given = {key: self._snapshot(given) for key, given in distinct.items()}
        return super().submit(method, arguments, returning, timeout=timeout, measure=measure)

    def run(self, rank: int, method: str, arguments: Arguments) -> Any:
        failure = self._failure_of(rank, method)
        if failure is not None and failure.error is not None:
            raise failure.error
        if failure is not None and failure.exit_cause is not None:
            raise self._died(rank, method, failure.exit_cause)
        value = super().run(rank, method, arguments)
        given = self._given[id(arguments)]
        self.calls[rank].append(RecordedCall(method, given.args, given.kwargs, private_copy(value)))
        return value

    def _snapshot(self, arguments: Arguments) -> Arguments:
        def read(value: Any) -> Any:
            return value.resolve(self.fetch) if isinstance(value, Deferred) else private_copy(value)

        kwargs = {key: read(value) for key, value in arguments.kwargs.items()}
        return Arguments(tuple(map(read, arguments.args)), kwargs)

    def _failure_of(self, rank: int, method: str) -> InjectedFailure | None:
        failure = self.failures.get(rank)
        return failure if failure is not None and failure.method in (None, method) else None

    def _is_late(self, rank: int, method: str, timeout: float | None) -> bool:
        failure = self._failure_of(rank, method)
        return failure is not None and failure.late_by is not None and timeout is not None and failure.late_by > timeout

    def _timed_out(self, method: str, ranks: Sequence[int], timeout: float | None) -> CallTimeout:
        return CallTimeout(
            f"{self.role}.{method}: after {timeout:g} s no answer from {self._named(ranks)}",
            role=self.role,
            method=method,
            timeout=timeout,
            ranks=tuple(ranks),
            stacks={rank: "(mocked: late)" for rank in ranks},
        )

    def _named(self, ranks: Sequence[int]) -> str:
        return f"{self.role} {ranks_text(ranks)}"

    def _died(self, rank: int, method: str, exit_cause: str) -> GroupError:
        return WorkerDied(
            f"{self._named([rank])} died in {method}: {exit_cause}",
            role=self.role,
            rank=rank,
            coordinates=dict(self.coordinates[rank]) if self.coordinates else {},
            node=self.nodes[rank],
            method=method,
            exit_cause=exit_cause,
            log_tail="",
        )


class MockWorkerGroup(WorkerGroup):
    """A group of mocked ranks; see ``mock_worker_group``."""

    executor: MockExecutor

    @property
    def workers(self) -> list[Any]:
        """The worker objects, by rank."""
        return self.executor.workers

    @property
    def calls(self) -> list[list[RecordedCall]]:
        """What ran on each rank, by rank, in order."""
        return self.executor.calls

    @property
    def failures(self) -> dict[int, InjectedFailure]:
        """What is to go wrong, by rank; entries may be added and taken out between calls."""
        return self.executor.failures


def mock_worker_group(
    worker: type | ClassWithInitArgs[Any],
    layout: int | ParallelLayout | Topology,
    *args: Any,
    name: str = "mock",
    failures: Mapping[int, InjectedFailure] | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> MockWorkerGroup:
    """A group of ``worker`` objects, one per rank of ``layout``, made with ``args`` and ``kwargs`` on mocked ranks.

    Args:
        worker: the worker class, or a ClassWithInitArgs (then without further arguments for it).
        layout: a ParallelLayout; a Topology, for ranks in another order than the layout's; or a number of ranks, which
            are then data-parallel.
        name: the role, in messages.
        failures: what goes wrong on which rank: ``raises(...)``, ``dies(...)`` or ``is_late(...)``.
        timeout: seconds; the deadline of calls that set none of their own.

    Raises DispatchError where ``failures`` names a rank that the layout does not have or something that is no failure.
    """
    topology = as_topology(layout)
    for rank, failure in (failures or {}).items():
        if not isinstance(failure, InjectedFailure):
            raise DispatchError(
                f"failures[{rank!r}] is {failure!r}; expected raises(...), dies(...) or is_late(...)", failure=failure
            )
    strangers = [rank for rank in failures or {} if rank not in range(topology.world_size)]
    if strangers:
        raise DispatchError(
            f"failures are given for {ranks_text(strangers)}, and the layout has {topology.world_size} ranks",
            ranks=strangers,
            world_size=topology.world_size,
        )
    made = worker if isinstance(worker, ClassWithInitArgs) else ClassWithInitArgs(worker, *args, **kwargs)
    executor = MockExecutor(made, topology, name, failures or {})
    return MockWorkerGroup(made.cls, executor, name, timeout=timeout, topology=topology)


@contextlib.contextmanager
def mocked_rank(layout: int | ParallelLayout | Topology, rank: int) -> Iterator[dict[str, int]]:
    """While the block runs, Megatron and torch.distributed answer as on this rank of the layout; gives its coordinates.

    For tests of plain functions that ask Megatron where they are.
    """
    topology = as_topology(layout)
    with MockedRanks(topology).standing(rank):
        yield topology.coordinates(rank)


def as_topology(layout: int | ParallelLayout | Topology) -> Topology:
    if isinstance(layout, Topology):
        return layout
    if not isinstance(layout, int | ParallelLayout):
        raise LayoutError(f"layout is {layout!r}; expected a ParallelLayout, a Topology or a number of ranks")
    return Topology.from_layout(ParallelLayout(world_size=layout) if isinstance(layout, int) else layout)
