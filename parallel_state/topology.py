"""Topology: the coordinates of every rank of a group, checked to form a full grid, and queries on them.

A topology is collected from the ranks, not computed from a rule: nothing here assumes that the order of ranks is the
order of shards. Every instance is a full grid, so each combination of coordinates belongs to exactly one rank.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from parallel_state.axes import (
    DENSE_AXES,
    EXPERT_AXES,
    RANK_AXIS,
    FrozenMap,
    coordinates_text,
    dense_grid,
    expert_grid,
    grid_size,
    is_count,
    product_text,
    ranks_text,
    span_text,
)
from parallel_state.describe import topology_text
from parallel_state.errors import TopologyError
from parallel_state.infos import (
    DistGlobalInfo,
    DistRankInfo,
    agreed_sizes,
    columns_of,
    sizes_of,
)
from parallel_state.layout import ParallelLayout

_MEGATRON_AXES = (*DENSE_AXES, *EXPERT_AXES)


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class Topology:
    """The coordinates of every rank of a group; immutable, hashable and picklable.

    Build one with ``from_infos`` (collected), ``from_layout`` (declared) or ``flat`` (no axis but the rank). Every
    method that takes an axis also takes the pseudo-axis ``"rank"``, on which each rank has its own index.

    Attributes:
        world_size: the number of ranks.
        sizes: axis -> size.
        columns: axis -> the index of every rank, by rank.
        vpp: the number of virtual stages on each pipeline stage; None without virtual stages.
        nodes: the node of every rank, by rank; None if not known.

    Raises:
        TopologyError: the ranks do not form a full grid. The message names the ranks that are wrong.

    Examples:
        >>> topology = Topology.from_layout(ParallelLayout(world_size=8, tp=2, pp=2))
        >>> topology.select(tp=0, pp=-1), topology.shard_indices(("dp",))
        ((4, 6), (0, 0, 1, 1, 0, 0, 1, 1))
    """

    world_size: int
    sizes: Mapping[str, int]
    columns: Mapping[str, Sequence[int]]
    vpp: int | None = None
    nodes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None and len(self.nodes) != self.world_size:
            raise TopologyError(
                f"{len(self.nodes)} nodes for {self.world_size} ranks; expected one per rank",
                world_size=self.world_size,
            )
        immutable = {
            "sizes": FrozenMap(self.sizes),
            "columns": FrozenMap((axis, tuple(column)) for axis, column in self.columns.items()),
            "nodes": None if self.nodes is None else tuple(self.nodes),
        }
        for name, value in immutable.items():
            object.__setattr__(self, name, value)
        for grid in filter(None, (self.dense_axes, self.expert_axes)):
            _check_full_grid(self, grid)

    @classmethod
    def from_layout(cls, layout: ParallelLayout, nodes: Sequence[str] | None = None) -> Topology:
        """Return the topology of ranks in the layout's own order.

        Args:
            layout: the declared sizes and order of the axes.
            nodes: the node of every rank, by rank.

        Raises:
            TopologyError: ``layout`` is of another type, or there is not one node for each rank.
        """
        if not isinstance(layout, ParallelLayout):
            raise TopologyError(f"layout is {layout!r}; expected a ParallelLayout, as in ParallelLayout(8, tp=2)")
        columns = {axis: layout.column(axis) for axis in layout.sizes}
        return cls(layout.world_size, layout.sizes, columns, vpp=layout.vpp, nodes=nodes)

    @classmethod
    def from_infos(
        cls,
        rank_infos: Sequence[DistRankInfo],
        global_infos: Sequence[DistGlobalInfo],
        nodes: Sequence[str] | None = None,
        declared: ParallelLayout | None = None,
    ) -> Topology:
        """Return the topology that the ranks report.

        Args:
            rank_infos: the coordinates that each rank reports, by rank.
            global_infos: the sizes that each rank reports, by rank.
            nodes: the node of every rank, by rank.
            declared: the layout whose sizes the ranks must report.

        Raises:
            TopologyError: the ranks disagree on a size, a coordinate is outside its axis, two ranks report the same
                coordinates, or the sizes are not those of ``declared``. The message names the ranks.
        """
        world_size = len(rank_infos)
        if world_size == 0 or len(global_infos) != world_size:
            raise TopologyError(
                f"{world_size} rank infos and {len(global_infos)} global infos; expected one of each per rank",
                world_size=world_size,
            )

        label = functools.partial(_label, nodes=nodes)
        global_info = agreed_sizes(global_infos, label)
        sizes = sizes_of(global_info)
        if declared is not None:
            _check_declared(sizes, global_info.vpp_size, declared)
        columns = columns_of(rank_infos, global_info, label)
        return cls(world_size, sizes, columns, vpp=global_info.vpp_size, nodes=nodes)

    @classmethod
    def flat(cls, world_size: int, nodes: Sequence[str] | None = None) -> Topology:
        """Return the topology of ranks without axes: ``"rank"`` is the only axis.

        Args:
            world_size: the number of ranks.
            nodes: the node of every rank, by rank.
        """
        if not is_count(world_size):
            raise TopologyError(f"world_size is {world_size!r}; expected an int of at least 1", world_size=world_size)
        return cls(world_size, {RANK_AXIS: world_size}, {RANK_AXIS: range(world_size)}, nodes=nodes)

    @property
    def dense_axes(self) -> tuple[str, ...]:
        """The axes of the dense grid, which spans all ranks: tp, cp, dp, pp and the user-defined axes."""
        return dense_grid(self.sizes)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes of the expert grid, which spans all ranks: etp, ep, edp, pp and the user-defined axes.

        Empty if the ranks report no expert grid.
        """
        return expert_grid(self.sizes)

    def size(self, axis: str) -> int:
        """Return the size of ``axis``.

        Raises:
            TopologyError: the topology has no such axis; the message lists those that it has.
        """
        if axis == RANK_AXIS:
            return self.world_size
        if axis not in self.sizes:
            raise TopologyError(
                f"the topology has no axis {axis!r}; it has {', '.join(self.sizes)}, and the pseudo-axis 'rank'",
                axis=axis,
                axes=tuple(self.sizes),
            )
        return self.sizes[axis]

    def column(self, axis: str) -> Sequence[int]:
        """Return the index of every rank on ``axis``, by rank.

        Raises:
            TopologyError: the topology has no such axis.
        """
        self.size(axis)
        return range(self.world_size) if axis == RANK_AXIS else self.columns[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of ``rank`` on every axis, dense and expert.

        Raises:
            TopologyError: there is no such rank.
        """
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise TopologyError(
                f"rank {rank!r} is out of range for {self.world_size} ranks ({span_text(self.world_size)})", rank=rank
            )
        return {axis: column[rank] for axis, column in self.columns.items()}

    def rank_info(self, rank: int) -> DistRankInfo:
        """Return the coordinates of ``rank`` as a Megatron worker reports them.

        Raises:
            TopologyError: there is no such rank.
        """
        indices = self.coordinates(rank)
        known = {f"{axis}_rank": index for axis, index in indices.items() if axis in _MEGATRON_AXES}
        return DistRankInfo(**known, extra=_user_defined(indices))

    def global_info(self) -> DistGlobalInfo:
        """Return the size of every axis as a Megatron worker reports them."""
        known = {f"{axis}_size": size for axis, size in self.sizes.items() if axis in _MEGATRON_AXES}
        return DistGlobalInfo(**known, vpp_size=self.vpp, extra=_user_defined(self.sizes))

    def select(self, **coordinates: int) -> tuple[int, ...]:
        """Return the ranks with these coordinates, in rank order.

        Args:
            coordinates: an index on each axis to select on; a negative one counts from the end of its axis.

        Raises:
            TopologyError: an unknown axis, an index outside its axis, or a combination of dense and expert
                coordinates that no rank has.
        """
        ranks: Iterable[int] = range(self.world_size)
        for axis, index in coordinates.items():
            size = self.size(axis)
            if not -size <= index < size:
                raise TopologyError(
                    f"{axis}={index!r} lies outside axis {axis} of size {size} ({span_text(size)})",
                    axis=axis,
                    index=index,
                )
            column = self.column(axis)
            ranks = [rank for rank in ranks if column[rank] == index % size]
        selected = tuple(ranks)
        if not selected:
            raise TopologyError(
                f"no rank has the coordinates {coordinates_text(coordinates)}: dense and expert axes overlap",
                coordinates=coordinates,
            )
        return selected

    def shard_count(self, axes: Sequence[str]) -> int:
        """Return the number of shards of a batch that is split over ``axes``; 1 without axes.

        Raises:
            TopologyError: an unknown axis, or an axis that is named twice.
        """
        axes = self._split_axes(axes)
        return grid_size(axes, {axis: self.size(axis) for axis in axes})

    def shard_indices(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the index of every rank's shard, by rank, when a batch is split over ``axes``.

        Args:
            axes: the axes, the first one slowest. Dense and expert axes may be mixed if every combination of their
                indices has a rank.

        Raises:
            TopologyError: an unknown axis, an axis that is named twice, or a shard that would have no rank.
        """
        axes = self._split_axes(axes)
        if not axes:
            return (0,) * self.world_size
        sizes = {axis: self.size(axis) for axis in axes}
        indices = _grid_positions(axes, sizes, {axis: self.column(axis) for axis in axes})
        if not any(set(axes) <= set(grid) for grid in (self.dense_axes, self.expert_axes)):
            self._check_independent(axes, sizes, indices)
        return tuple(indices)

    def describe(self, max_rows: int = 16) -> str:
        """Return the topology as text for people: replicas by pipeline stage, and the nodes if they are known.

        Args:
            max_rows: the largest number of rows of a table; rows in the middle of a longer one are left out.
        """
        return topology_text(self.sizes, self.columns, vpp=self.vpp, nodes=self.nodes, max_rows=max_rows)

    def label(self, rank: int) -> str:
        """Return the text with which messages name a rank: its number, and its node if that is known."""
        return _label(rank, self.nodes)

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items() if axis != RANK_AXIS)
        return f"Topology({', '.join(filter(None, (f'world_size={self.world_size}', sizes)))})"

    def _split_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        if len(set(axes)) < len(axes) or (RANK_AXIS in axes and len(axes) > 1):
            raise TopologyError(
                f"cannot split over {', '.join(axes)}: name each axis once, and 'rank' only alone", axes=axes
            )
        return axes

    def _check_independent(self, axes: Sequence[str], sizes: Mapping[str, int], indices: Sequence[int]) -> None:
        combinations, expected = len(set(indices)), grid_size(axes, sizes)
        if combinations < expected:
            raise TopologyError(
                f"cannot split over {', '.join(axes)}: of {product_text(axes, sizes)} = {expected} shards only "
                f"{combinations} would have a rank: dense and expert axes overlap; split over the axes of one grid: "
                f"{', '.join(self.dense_axes)} or {', '.join(self.expert_axes)}",
                axes=tuple(axes),
            )


def _user_defined(values: Mapping[str, int]) -> dict[str, int]:
    return {axis: value for axis, value in values.items() if axis not in _MEGATRON_AXES}


def _label(rank: int, nodes: Sequence[str] | None) -> str:
    return f"rank {rank} (on node {nodes[rank]})" if nodes else f"rank {rank}"


def _check_declared(sizes: Mapping[str, int], vpp: int | None, declared: ParallelLayout) -> None:
    reported: dict[str, int | None] = {**sizes, "vpp": vpp}
    expected: dict[str, int | None] = {**declared.sizes, "vpp": declared.vpp}
    if declared.ep == 1 and "ep" not in reported:
        expected = {axis: size for axis, size in expected.items() if axis not in EXPERT_AXES}
    differing = [axis for axis in {**expected, **reported} if reported.get(axis) != expected.get(axis)]
    if differing:
        listed = ", ".join(f"{axis} {reported.get(axis)} (declared {expected.get(axis)})" for axis in differing)
        raise TopologyError(
            f"the ranks report other sizes than the layout declares: {listed}. Use the same sizes for the group and in "
            "the configuration of its workers (parallel)",
            axes=tuple(differing),
            reported=reported,
            declared=expected,
        )


def _check_full_grid(topology: Topology, axes: Sequence[str]) -> None:
    """Raise TopologyError unless each combination of indices on ``axes`` belongs to exactly one rank."""
    sizes, columns, world_size = topology.sizes, topology.columns, topology.world_size
    if grid_size(axes, sizes) != world_size:
        raise TopologyError(
            f"{product_text(axes, sizes)} = {grid_size(axes, sizes)} ranks expected, but {world_size} report",
            world_size=world_size,
            sizes={axis: sizes[axis] for axis in axes},
        )
    for axis in axes:
        _check_column(topology, axis)
    positions = _grid_positions(axes, sizes, columns)
    if len(set(positions)) != world_size:
        raise _shared_coordinates(topology, axes, positions)


def _check_column(topology: Topology, axis: str) -> None:
    size, column = topology.sizes[axis], topology.columns[axis]
    if set(map(type, column)) == {int} and min(column) >= 0 and max(column) < size:
        return
    wrong = tuple(rank for rank, index in enumerate(column) if type(index) is not int or not 0 <= index < size)
    more = f"; likewise {ranks_text(wrong[1:])}" if len(wrong) > 1 else ""
    raise TopologyError(
        f"{topology.label(wrong[0])} reports {axis}_rank {column[wrong[0]]!r}, outside axis {axis} of size {size} "
        f"({span_text(size)}){more}",
        ranks=wrong,
        axis=axis,
    )


def _grid_positions(axes: Sequence[str], sizes: Mapping[str, int], columns: Mapping[str, Sequence[int]]) -> list[int]:
    """Return every rank's coordinates on ``axes`` as one number, by rank, the first axis slowest."""
    positions: list[int] | None = None
    for axis in axes:
        size, column = sizes[axis], columns[axis]
        if positions is None:
            positions = list(column)
        elif size > 1:
            positions = [position * size + index for position, index in zip(positions, column, strict=True)]
    return positions or []


def _grid_coordinates(position: int, axes: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the coordinates of one number of ``_grid_positions``."""
    indices = {}
    for axis in reversed(axes):
        position, indices[axis] = divmod(position, sizes[axis])
    return {axis: indices[axis] for axis in axes}


def _shared_coordinates(topology: Topology, axes: Sequence[str], positions: Sequence[int]) -> TopologyError:
    """Return the error for coordinates that several ranks report, while as many others are reported by none."""
    ranks_at: dict[int, list[int]] = defaultdict(list)
    for rank, position in enumerate(positions):
        ranks_at[position].append(rank)
    shared = {position: ranks for position, ranks in ranks_at.items() if len(ranks) > 1}
    missing = [position for position in range(len(positions)) if position not in ranks_at]
    position, ranks = next(iter(shared.items()))
    missing_coordinates = _grid_coordinates(missing[0], axes, topology.sizes)
    message = (
        f"{ranks_text(ranks)} {'both' if len(ranks) == 2 else 'all'} report "
        f"{coordinates_text(_grid_coordinates(position, axes, topology.sizes))}, and no rank reports "
        f"{coordinates_text(missing_coordinates)}"
    )
    if len(missing) > 1:
        message += f"; in all {len(shared):,} coordinates are reported more than once and {len(missing):,} by no rank"
        involved = [rank for ranks in shared.values() for rank in ranks]
    else:
        involved = ranks
        odd = _odd_one_out(topology, ranks, missing_coordinates)
        if odd is not None:
            message += f"; judging by the order of all other ranks, {topology.label(odd)} is wrong"
    return TopologyError(message, ranks=tuple(involved), missing=len(missing))


def _odd_one_out(topology: Topology, candidates: Sequence[int], missing: Mapping[str, int]) -> int | None:
    """Return the one candidate that makes every axis regular in rank order if it had the missing coordinates.

    None if no candidate does, or more than one.
    """
    odd = []
    for rank in candidates:
        moved = {}
        for axis, index in missing.items():
            column = topology.columns[axis]
            moved[axis] = [*column[:rank], index, *column[rank + 1 :]]
        if all(_is_regular(column, topology.sizes[axis]) for axis, column in moved.items()):
            odd.append(rank)
    return odd[0] if len(odd) == 1 else None


def _is_regular(column: Sequence[int], size: int) -> bool:
    """Return whether the index goes up by one at a fixed number of ranks, and wraps around at ``size``."""
    stride = column.index(1) if size > 1 else 1
    return stride > 0 and all(index == rank // stride % size for rank, index in enumerate(column))
