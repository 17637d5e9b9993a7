"""Locality: which axes of a topology cross nodes.

The collectives of tp, cp, ep and etp run in every layer. Inside a node they use NVLink; between nodes they use the
network, which is many times slower. Data and pipeline parallelism send less, and usually span nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mcontroller.errors import ConfigError
from parallel_state.describe import runs_text
from parallel_state.topology import Topology

LOCAL_AXES = ("tp", "cp", "ep", "etp")
"""The axes whose collectives run in every layer."""


def crossing_groups(topology: Topology) -> dict[str, list[tuple[int, ...]]]:
    """Return the groups of ``LOCAL_AXES`` that span nodes, by axis; the ranks of each are in the order of the axis.

    Without an expert-parallel axis, etp is the same as tp and is left out. A topology without nodes has no such groups.

    Args:
        topology: the coordinates of the ranks, with their nodes.
    """
    nodes = topology.nodes
    if nodes is None:
        return {}
    axes = [axis for axis in LOCAL_AXES if axis in topology.sizes]
    if topology.sizes.get("ep", 1) == 1:
        axes = [axis for axis in axes if axis != "etp" or topology.sizes["etp"] != topology.sizes["tp"]]
    crossing = {
        axis: [group for group in _groups(topology, axis) if len({nodes[rank] for rank in group}) > 1] for axis in axes
    }
    return {axis: groups for axis, groups in crossing.items() if groups}


def locality_lines(topology: Topology) -> list[str]:
    """Return a sentence for each axis with ``crossing_groups``, with what to change."""
    crossing = crossing_groups(topology)
    return [_crossing_text(topology, topology.nodes or (), axis, groups) for axis, groups in crossing.items()]


def _crossing_text(topology: Topology, nodes: Sequence[str], axis: str, groups: Sequence[tuple[int, ...]]) -> str:
    size = topology.sizes[axis]
    on = ", ".join(dict.fromkeys(nodes[rank] for rank in groups[0]))
    fix = (
        f"put {axis} before the other axes in the layout's order, or choose sizes that divide the ranks of a node"
        if size <= max(nodes.count(node) for node in set(nodes))
        else f"a node has fewer ranks than the size of the axis, {size}: choose a smaller one"
    )
    first = f"such as ranks {runs_text(groups[0])} on {on}"
    return f"axis {axis} crosses nodes in {len(groups)} of {topology.world_size // size} groups, {first}; {fix}"


def nodes_of(world_size: int, ranks_per_node: int) -> list[str]:
    """Return the node of every rank, ``node0``, ``node1``..., for nodes that are filled one after the other.

    Raises:
        ConfigError: ``ranks_per_node`` is not a positive integer.
    """
    if ranks_per_node < 1:
        raise ConfigError(
            f"ranks_per_node is {ranks_per_node}; expected at least 1", key="ranks_per_node", value=ranks_per_node
        )
    return [f"node{rank // ranks_per_node}" for rank in range(world_size)]


def _groups(topology: Topology, axis: str) -> list[tuple[int, ...]]:
    """Return the groups of ranks that differ on this axis only; the ranks of each in the order of the axis."""
    grid = topology.dense_axes if axis in topology.dense_axes else topology.expert_axes
    others = [topology.column(other) for other in grid if other != axis]
    index = topology.column(axis)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(topology.world_size):
        groups[tuple(column[rank] for column in others)].append(rank)
    return [tuple(sorted(group, key=lambda rank: index[rank])) for group in groups.values()]
