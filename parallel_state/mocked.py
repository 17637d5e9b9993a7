"""Mocked ranks: in this process, torch.distributed and Megatron behave as on one rank of a topology.

Nothing is initialized and nothing communicates. Megatron's getters read module globals; inside ``activate(rank)``
these are groups that know their ranks only, so that the getters work no matter how they were imported. Each rank has
its own set of globals, and keeps its changes to them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch.distributed import HashStore, ProcessGroup
from torch.distributed.distributed_c10d import ProcessGroupGloo

from parallel_state import cpu
from parallel_state.errors import LayoutError, ParallelStateError
from parallel_state.rank_state import Attributes, RankState, StateSwitch, distributed_parts, of_a_new_process
from parallel_state.requirements import has_megatron
from parallel_state.topology import Topology

_ALL = "tp cp dp pp"
_GROUPS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "tp pp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp dp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp cp dp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": _ALL,
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "etp ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "etp ep pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "edp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "edp",
    # from megatron-core 0.19 on, which has a further axis; its size is 1
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp cp",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "edp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "edp",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "etp ep pp",
}
_RANK_LISTS = {
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "tp",
    "_PIPELINE_GLOBAL_RANKS": "pp",
    "_MODEL_PARALLEL_GLOBAL_RANKS": "tp pp",
    "_CONTEXT_PARALLEL_GLOBAL_RANKS": "cp",
    "_DATA_PARALLEL_GLOBAL_RANKS": "dp",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "dp cp",
    "_EXPERT_MODEL_PARALLEL_RANKS": "ep",
}


class NoCommunication(ParallelStateError, AttributeError):
    """A method of a mocked process group that only a real one has."""


class MockedGroup:
    """One rank's process group, which knows its ranks and cannot communicate.

    Args:
        name: the axes that the group spans.
        group_ranks: global rank -> rank within the group.
        rank: the global rank whose group this is.

    Attributes:
        group_name: as passed.
        group_ranks: as passed.
    """

    def __init__(self, name: str, group_ranks: Mapping[int, int], rank: int) -> None:
        self.group_name = name
        self.group_ranks = group_ranks
        self._rank = rank

    def rank(self) -> int:
        """Return the rank within the group."""
        return self.group_ranks[self._rank]

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.group_ranks)

    def __getattr__(self, name: str) -> NoReturn:
        raise NoCommunication(
            f"mocked process group ({self.__dict__.get('group_name')}) has no {name!r}: mocked ranks run one after "
            "another and cannot communicate; replace the collective in the test, or run real ranks"
        )

    def __repr__(self) -> str:
        return f"MockedGroup({self.group_name}: ranks {list(self.group_ranks)}, of rank {self._rank})"


@functools.cache
def _group_of_one() -> ProcessGroup:
    """Return a real group of one rank: its collectives are computed, as those of a group without others can be."""
    store = HashStore()
    group = ProcessGroup(store, 0, 1)
    gloo = ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), gloo, ProcessGroupGloo(store, 0, 1, timedelta(seconds=60)))
    group._set_default_backend(gloo)
    group._set_group_name("mocked group of one rank")  # type: ignore[arg-type]
    return group


def _group(name: str, group_ranks: Mapping[int, int], rank: int) -> ProcessGroup | MockedGroup:
    return MockedGroup(name, group_ranks, rank) if len(group_ranks) > 1 else _group_of_one()


def _groups_over(topology: Topology, axes: Sequence[str]) -> list[Mapping[int, int]]:
    """Return the group of every rank that differs from it on ``axes`` only, by rank: global rank -> rank within it.

    A group over one axis is in the order of its coordinates, a group over several axes in rank order, as torch sorts
    it. For ranks in Megatron's order, the two orders are the same.
    """
    grid = topology.dense_axes if set(axes) <= set(topology.dense_axes) else topology.expert_axes
    group_of = topology.shard_indices([axis for axis in grid if axis not in axes])
    spread = [axis for axis in axes if topology.size(axis) > 1]
    order_of = topology.column(spread[0] if len(spread) == 1 else "rank")
    members: dict[int, list[tuple[int, int]]] = {}
    for rank, group in enumerate(group_of):
        members.setdefault(group, []).append((order_of[rank], rank))
    group_ranks = {
        group: {rank: index for index, (_, rank) in enumerate(sorted(ranks))} for group, ranks in members.items()
    }
    return [group_ranks[group] for group in group_of]


class MockedRanks:
    """The ranks of a topology, of which one at a time can be active: ``with ranks.activate(3): ...``.

    torch.distributed is always mocked, Megatron's getters if Megatron is installed and the topology has its axes.

    Args:
        topology: the coordinates of the ranks.

    Attributes:
        topology: as passed.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._megatron = _parallel_state() if "tp" in topology.sizes else None
        known = set(topology.sizes) if self._megatron is not None else set[str]()
        spans = {span for span in (*_GROUPS.values(), *_RANK_LISTS.values()) if set(span.split()) <= known}
        self._groups = {span: _groups_over(topology, span.split()) for span in spans}
        self._world = {rank: rank for rank in range(topology.world_size)}
        self._parts = distributed_parts()
        if self._megatron is not None:
            names = (*self._initial_globals(0), "initialize_model_parallel")
            self._parts.append(Attributes(self._megatron, names, of_a_new_process))
        self._switch = StateSwitch(self._parts)
        self._states: dict[int, RankState] = {}

    @contextlib.contextmanager
    def activate(self, rank: int) -> Iterator[None]:
        """Return a context manager in which torch.distributed and Megatron behave as on ``rank``.

        Blocks can be nested. Not thread-safe.
        """
        if rank not in self._states:
            self._states[rank] = self._new_state(rank)
        with self._switch.activate(self._states[rank]):
            yield

    def _initial_globals(self, rank: int) -> dict[str, Any]:
        """Return Megatron's globals as they are on a rank after ``initialize_model_parallel``."""
        if self._megatron is None:
            return {}
        values: dict[str, Any] = {
            name: _group(span, self._groups[span][rank], rank) for name, span in _GROUPS.items() if span in self._groups
        }
        values |= {name: list(self._groups[span][rank]) for name, span in _RANK_LISTS.items() if span in self._groups}
        stages = values["_PIPELINE_GLOBAL_RANKS"]
        values["_EMBEDDING_GLOBAL_RANKS"] = sorted({stages[0], stages[-1]})
        values["_POSITION_EMBEDDING_GLOBAL_RANKS"] = stages[:1]
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = self.topology.vpp
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = None if self.topology.vpp is None else 0
        known = vars(self._megatron)
        for name in [name for name in values if f"{name}_GLOO" in known]:
            values[f"{name}_GLOO"] = values[name]
        overrides = {name: None for name in known if name.startswith("_MPU_")}
        return overrides | {name: value for name, value in values.items() if name in known}

    def _new_state(self, rank: int) -> RankState:
        """Return the state of a rank on which torch.distributed and Megatron are initialized."""
        initial = self._initial_globals(rank)
        world = _group("world", self._world, rank)
        groups = {world, *(value for value in initial.values() if isinstance(value, MockedGroup | ProcessGroup))}
        alone = {rank: 0}
        distributed: dict[str, Any] = {
            "_pg_group_ranks": {
                member: member.group_ranks if isinstance(member, MockedGroup) else alone for member in groups
            },
            "_pg_map": {group: ("gloo", None) for group in groups},
            "_default_pg": world,
        }
        state = RankState(self._parts)
        for values in state.values:
            values.update({name: value for name, value in distributed.items() if name in values})
        if self._megatron is not None:
            state.values[-1] = initial | {"initialize_model_parallel": self._mocked_initialize(initial)}
        return state

    def _mocked_initialize(self, initial: dict[str, Any]) -> Any:
        """Return the replacement of ``initialize_model_parallel``, which checks that the sizes are the topology's."""

        def initialize_model_parallel(
            tensor_model_parallel_size: int = 1,
            pipeline_model_parallel_size: int = 1,
            *_: Any,
            context_parallel_size: int = 1,
            expert_model_parallel_size: int = 1,
            **__: Any,
        ) -> None:
            requested = {
                "tp": tensor_model_parallel_size,
                "pp": pipeline_model_parallel_size,
                "cp": context_parallel_size,
                "ep": expert_model_parallel_size,
            }
            sizes = {axis: self.topology.sizes.get(axis, 1) for axis in requested}
            if requested != sizes:
                raise LayoutError(
                    f"the worker initializes Megatron with {requested}, but its ranks are mocked with {sizes}; use the "
                    "same layout for both",
                    requested=requested,
                    mocked=sizes,
                )
            vars(self._megatron).update(initial)

        return initialize_model_parallel


def _parallel_state() -> ModuleType | None:
    """Import Megatron's module of groups; None if Megatron is not installed."""
    if not has_megatron():
        return None
    if "megatron.core" not in sys.modules:
        cpu.install()
    return importlib.import_module("megatron.core.parallel_state")
