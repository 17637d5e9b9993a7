"""Attributes and methods of groups that ported code uses; see docs/porting.md for what new code uses instead."""

from __future__ import annotations

from typing import Any, Protocol, overload

from mcontroller.errors import ConfigError, TopologyError
from parallel_state.axes import DENSE_AXES, EXPERT_AXES
from parallel_state.infos import DistGlobalInfo, DistRankInfo
from parallel_state.topology import Topology

__all__ = ["PortedGroup", "PortedRayGroup", "check_bin_pack"]


class HasTopology(Protocol):
    """The part of a group that these names use."""

    @property
    def name(self) -> str:
        """The role, as error messages name it."""

    @property
    def topology(self) -> Topology:
        """The coordinates of every rank."""


class PortedGroup:
    """The coordinates of the ranks in the form of verl's ``MegatronWorkerGroup``; ``group.topology`` has them too."""

    @overload
    def get_megatron_rank_info(self: HasTopology, rank: int) -> DistRankInfo: ...
    @overload
    def get_megatron_rank_info(self: HasTopology, rank: None = None) -> list[DistRankInfo]: ...
    def get_megatron_rank_info(self: HasTopology, rank: int | None = None) -> DistRankInfo | list[DistRankInfo]:
        """Return the coordinates of a rank, or of every rank by rank, from the collected topology.

        Raises:
            TopologyError: the workers report no coordinates, or there is no such rank.
        """
        topology = _megatron_topology(self)
        if rank is None:
            return [_rank_info(topology, each) for each in range(topology.world_size)]
        return _rank_info(topology, rank)

    def get_megatron_global_info(self: HasTopology) -> DistGlobalInfo:
        """Return the size of each axis, from the collected topology.

        Raises:
            TopologyError: the workers report no coordinates.
        """
        topology = _megatron_topology(self)
        sizes = {f"{axis}_size": topology.sizes[axis] for axis in (*DENSE_AXES, *EXPERT_AXES) if axis in topology.sizes}
        return DistGlobalInfo(**sizes, vpp_size=topology.vpp, extra=_extra(topology.sizes))


class PortedRayGroup:
    """The names that verl's ``RayWorkerGroup`` has in addition to those of ``RayWorkerGroup``."""

    name: str
    executor: Any

    @property
    def name_prefix(self) -> str:
        """The name of the group."""
        return self.name

    @property
    def workers(self) -> list[Any]:
        """Ray's handle of every rank's process. Call methods through the group: the handles have none of the worker."""
        return list(self.executor.processes.handles.actors)

    @property
    def master_address(self) -> str:
        """The address of the rendezvous, on the node of rank 0."""
        return str(self.executor.processes.handles.infos[0].rendezvous.address)

    @property
    def master_port(self) -> str:
        """The port of the rendezvous."""
        return str(self.executor.processes.handles.infos[0].rendezvous.port)

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Raise if a process of the group has ended. No thread is needed: every call raises WorkerDied within a bound.

        Args:
            every_n_seconds: accepted for ported code, and not used.

        Raises:
            WorkerDied: a process has ended.
            GroupBroken: an earlier call failed.
            GroupError: the group has been shut down.
        """
        self.executor.processes.check(self.name)


def check_bin_pack(bin_pack: object) -> None:
    """Raise ConfigError unless ``bin_pack``, an argument of verl's ``RayWorkerGroup``, is True.

    In verl it is the third positional argument, which is ``name_prefix`` here; the name of a group is a string.
    """
    if bin_pack is not True:
        raise ConfigError(
            f"bin_pack is {bin_pack!r}: a pool keeps all bundles of a node together; leave the argument out, and list "
            "smaller nodes in process_on_nodes",
            key="bin_pack",
            value=bin_pack,
        )


def _megatron_topology(group: HasTopology) -> Topology:
    topology = group.topology
    if not all(axis in topology.sizes for axis in DENSE_AXES):
        raise TopologyError(
            f"group {group.name} has no axis {', '.join(DENSE_AXES)}: its workers report no coordinates",
            role=group.name,
        )
    return topology


def _rank_info(topology: Topology, rank: int) -> DistRankInfo:
    indices = topology.coordinates(rank)
    known = {f"{axis}_rank": indices[axis] for axis in (*DENSE_AXES, *EXPERT_AXES) if axis in indices}
    return DistRankInfo(**known, extra=_extra(indices))


def _extra(values: Any) -> dict[str, int]:
    return {axis: value for axis, value in values.items() if axis not in (*DENSE_AXES, *EXPERT_AXES)}
