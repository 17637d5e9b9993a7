"""Coordinates of ranks and axes of groups, as messages and traces show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parallel_state.simulated.calls import SharedGroup
from parallel_state.topology import Topology

__all__ = ["AxesOfGroups"]

# Megatron's description of a group -> the axis on which its members differ.
_OF_DESCRIPTION = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
}


class AxesOfGroups:
    """The axes of a topology; without one, those of Megatron's groups by their descriptions.

    Args:
        topology: The coordinates of the ranks; None, or a number of ranks, if they are not known.
    """

    def __init__(self, topology: Topology | int | None) -> None:
        self._topology = topology if isinstance(topology, Topology) else None

    def describe(self, rank: int, groups: Iterable[SharedGroup]) -> str:
        """Return a rank with its index on every axis of more than one rank.

        Args:
            rank: The rank.
            groups: The groups that it has created, for ranks without a topology.
        """
        if self._topology is not None:
            axes = [axis for axis in self._topology.dense_axes if self._topology.size(axis) > 1]
            coordinates = {axis: self._topology.coordinates(rank)[axis] for axis in axes}
        else:
            named = {_OF_DESCRIPTION[each.description]: each for each in groups if each.description in _OF_DESCRIPTION}
            coordinates = {
                axis: named[axis].ranks.index(rank)
                for axis in ("tp", "cp", "dp", "pp")
                if axis in named and len(named[axis].ranks) > 1
            }
        text = " ".join(f"{axis}={index}" for axis, index in coordinates.items())
        return f"rank {rank} ({text})" if text else f"rank {rank}"

    def of_group(self, ranks: Sequence[int], description: str) -> str:
        """Return the axes on which the members of a group differ, such as ``"tp"`` or ``"dp-cp"``."""
        if self._topology is None or len(ranks) == 1:
            return _OF_DESCRIPTION.get(description, "")
        expert = description.startswith("EXPERT")
        axes = self._topology.expert_axes if expert else self._topology.dense_axes
        coordinates = [self._topology.coordinates(rank) for rank in ranks]
        return "-".join(axis for axis in axes if len({each[axis] for each in coordinates}) > 1)
