"""Workers and local groups for tests of what happens to a call's arguments and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import DispatchSpec, Execute, RowRule
from mcontroller.dispatch.registration import Registration
from mcontroller.group import GroupMethod, WorkerGroup
from mcontroller.local import LocalExecutor
from mcontroller.worker import ClassWithInitArgs, Worker
from parallel_state.axes import FrozenMap
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology
from tests.parallel_state.layouts import layouts


class Echo(Worker):
    """Returns its arguments and records them."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def identity(self, batch: DataProto, *others: Any, **more: Any) -> DataProto:
        self.received.append((batch, others, more))
        return batch

    def rank_and_arguments(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self.rank, args, kwargs

    def rows_seen(self, batch: DataProto) -> list[int]:
        return batch.batch["n"].tolist()  # type: ignore[index]

    def repeated(self, batch: DataProto, times: int) -> DataProto:
        return batch.repeat(times, interleave=True)


def group_on(topology: Topology | int, worker_cls: type = Echo, name: str = "echo") -> WorkerGroup[Any]:
    """A local group whose ranks have the coordinates of the topology."""
    topology = Topology.flat(topology) if isinstance(topology, int) else topology
    executor = LocalExecutor(ClassWithInitArgs(worker_cls), topology.world_size, name)
    return WorkerGroup(worker_cls, executor, name, topology=topology)


def method(
    group: WorkerGroup[Any], name: str, mode: DispatchSpec, *, blocking: bool = True, **rows: Any
) -> GroupMethod[..., Any, Any]:
    """A method of the group, as if it had been registered with this mode."""
    changes_rows = name == "repeated"
    rule = Registration(mode, Execute.ALL, blocking=blocking, rows=RowRule(**rows), changes_rows=changes_rows)
    return GroupMethod(group, name, rule)


def received(group: WorkerGroup) -> list[DataProto]:
    """The batch that each rank got in its last call of ``identity``, by rank."""
    return [worker.received[-1][0] for worker in group.executor.workers]  # type: ignore[attr-defined]


def topology_of(world_size: int, **sizes: Any) -> Topology:
    return Topology.from_layout(ParallelLayout(world_size, **sizes))


def permuted(topology: Topology, positions: Sequence[int]) -> Topology:
    """The same grid, in which rank ``r`` has the coordinates of the former rank ``positions[r]``."""
    columns = {axis: tuple(column[position] for position in positions) for axis, column in topology.columns.items()}
    return replace(topology, columns=FrozenMap(columns))


@st.composite
def topologies(draw: st.DrawFn, max_world_size: int = 24) -> Topology:
    """Any legal layout, its ranks in any order."""
    topology = Topology.from_layout(draw(layouts(max_world_size)))
    if draw(st.booleans()):
        return topology
    return permuted(topology, draw(st.permutations(range(topology.world_size))))
