"""Locality: which axes of a topology cross nodes, and which nodes have ranks that do not follow each other.

The collectives of tp, cp, ep and etp run in every layer. Inside a node they use NVLink; between nodes they use the
network, which is many times slower. Data and pipeline parallelism send less, and usually span nodes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mcontroller.errors import ConfigError
from parallel_state.axes import RANK_AXIS
from parallel_state.describe import runs_text
from parallel_state.topology import Topology

__all__ = [
    "LOCAL_AXES",
    "CrossingAxis",
    "Locality",
    "ScatteredNode",
    "check_axes",
    "locality",
    "log_findings",
    "nodes_of",
]

logger = logging.getLogger(__name__)

LOCAL_AXES = ("tp", "cp", "ep", "etp")
"""The axes whose collectives run in every layer."""


@dataclass(frozen=True, slots=True)
class CrossingAxis:
    """An axis with groups of ranks on several nodes.

    Attributes:
        axis: the axis.
        groups: its groups that span nodes; the ranks of each in the order of the axis.
        group_count: the number of all its groups.
        needed_nodes: the least number of nodes on which the largest of these groups has room.
    """

    axis: str
    groups: tuple[tuple[int, ...], ...]
    group_count: int
    needed_nodes: int

    def text(self, nodes: Sequence[str]) -> str:
        """Return the finding as a sentence with the first group, and what to change.

        Args:
            nodes: the node of every rank.
        """
        first = self.groups[0]
        where = ", ".join(dict.fromkeys(nodes[rank] for rank in first))
        example = f"such as ranks {runs_text(first)} on {where}"
        fix = (
            f"put {self.axis} before the other axes in the layout's order, or choose sizes that divide the ranks of a "
            "node"
            if self.needed_nodes == 1
            else f"a node has fewer ranks than the size of the axis, {len(first)}: choose a smaller one"
        )
        return f"axis {self.axis} crosses nodes in {len(self.groups)} of {self.group_count} groups, {example}; {fix}"


@dataclass(frozen=True, slots=True)
class ScatteredNode:
    """A node whose ranks do not follow each other, as a merged pool can have.

    Attributes:
        node: the node.
        ranks: its ranks.
    """

    node: str
    ranks: tuple[int, ...]

    def text(self) -> str:
        """Return the finding as a sentence, and what to change."""
        return (
            f"ranks {runs_text(self.ranks)} of node {self.node} do not follow each other; order the bundles of the "
            "pool by node, such as by merging the parts of one node first"
        )


@dataclass(frozen=True, slots=True)
class Locality:
    """What ``locality`` finds. False if it finds nothing.

    Attributes:
        nodes: the node of every rank.
        crossing: the axes that cross nodes, in the order of ``LOCAL_AXES``.
        scattered: the nodes whose ranks do not follow each other.
    """

    nodes: tuple[str, ...]
    crossing: tuple[CrossingAxis, ...]
    scattered: tuple[ScatteredNode, ...]

    def __bool__(self) -> bool:
        return bool(self.crossing or self.scattered)

    def lines(self) -> list[str]:
        """Return one sentence for each finding."""
        return [*(each.text(self.nodes) for each in self.crossing), *(each.text() for each in self.scattered)]


def locality(topology: Topology, allowed: Collection[str] = ()) -> Locality:
    """Return the axes of ``LOCAL_AXES`` that cross nodes, and the nodes whose ranks do not follow each other.

    Without an expert-parallel axis, etp is the same as tp and is left out. A topology without nodes has no findings.

    Args:
        topology: the coordinates of the ranks, with their nodes.
        allowed: axes that may cross nodes; ``"rank"`` accepts the ranks of a node in any order.

    Raises:
        ConfigError: ``allowed`` has a name that is neither one of ``LOCAL_AXES`` nor ``"rank"``.
    """
    check_axes(allowed)
    nodes = topology.nodes
    if nodes is None:
        return Locality((), (), ())
    axes = [axis for axis in LOCAL_AXES if axis in topology.sizes and axis not in allowed]
    if topology.sizes.get("ep", 1) == 1:
        axes = [axis for axis in axes if axis != "etp" or topology.sizes["etp"] != topology.sizes["tp"]]
    crossing = filter(None, (_crossing(topology, axis, nodes) for axis in axes))
    return Locality(tuple(nodes), tuple(crossing), () if RANK_AXIS in allowed else _scattered(nodes))


def log_findings(found: Locality, group: str) -> None:
    """Log one warning with the findings of a group; nothing if there are none."""
    if found:
        accept = "Pass axes_across_nodes to the group, or set trainer.axes_across_nodes, to accept an axis, or rank"
        logger.warning("group %s: %s. %s", group, ". ".join(found.lines()), accept)


def check_axes(allowed: Collection[str], key: str = "axes_across_nodes") -> None:
    """Raise ConfigError, which names ``key``, unless these are ``LOCAL_AXES`` or ``"rank"``."""
    if isinstance(allowed, str) or any(axis not in (*LOCAL_AXES, RANK_AXIS) for axis in allowed):
        raise ConfigError(
            f"{key} is {allowed!r}; expected a list with any of {', '.join(LOCAL_AXES)} and {RANK_AXIS}",
            key=key,
            value=allowed,
        )


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


def _crossing(topology: Topology, axis: str, nodes: Sequence[str]) -> CrossingAxis | None:
    groups = _groups(topology, axis)
    spanning = tuple(group for group in groups if len({nodes[rank] for rank in group}) > 1)
    if not spanning:
        return None
    room = max(nodes.count(node) for node in set(nodes))
    return CrossingAxis(axis, spanning, len(groups), -(-topology.sizes[axis] // room))


def _groups(topology: Topology, axis: str) -> list[tuple[int, ...]]:
    """Return the groups of ranks that differ on this axis only; the ranks of each in the order of the axis."""
    grid = topology.dense_axes if axis in topology.dense_axes else topology.expert_axes
    others = [topology.column(other) for other in grid if other != axis]
    index = topology.column(axis)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(topology.world_size):
        groups[tuple(column[rank] for column in others)].append(rank)
    return [tuple(sorted(group, key=lambda rank: index[rank])) for group in groups.values()]


def _scattered(nodes: Sequence[str]) -> tuple[ScatteredNode, ...]:
    ranks_on: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        ranks_on[node].append(rank)
    return tuple(
        ScatteredNode(node, tuple(ranks)) for node, ranks in ranks_on.items() if ranks[-1] - ranks[0] >= len(ranks)
    )
