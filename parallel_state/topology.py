"""Topology: the coordinates of every rank of a group, verified, and what can be asked of them.

A topology is collected from the ranks, not computed from a rule: nothing here takes the order of ranks to be the
order of shards. Each instance has been checked to be a full grid, so a shard always has a rank and a place only one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from parallel_state.axes import (
    EXPERT_AXES,
    RANK_AXIS,
    FrozenMap,
    from_end,
    is_count,
    place_text,
    product_text,
    span_text,
    total,
)
from parallel_state.describe import describe
from parallel_state.errors import TopologyError
from parallel_state.grid import check_full_grid, places
from parallel_state.infos import (
    DistGlobalInfo,
    DistRankInfo,
    agreed_sizes,
    check_virtual_stages,
    columns_of,
    sizes_of,
)
from parallel_state.layout import ParallelLayout

__all__ = ["DistGlobalInfo", "DistRankInfo", "Topology"]


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class Topology:
    """Where every rank stands: immutable, hashable by its sizes, picklable.

    Made by `from_infos` (collected), `from_layout` (declared) or `flat` (no axes but the rank). `columns` holds, for
    every axis, the index of every rank; `nodes` and `names`, where known, are one text per rank. Wherever an axis is
    asked for, the pseudo-axis "rank" stands for every rank by itself.

    >>> topology = Topology.from_layout(ParallelLayout(world_size=8, tp=2, pp=2))
    >>> topology.select(tp=0, pp=-1), topology.shard_indices(("dp",))
    ((4, 6), (0, 0, 1, 1, 0, 0, 1, 1))

    Raises TopologyError, naming the ranks, where they do not form a full grid.
    """

    world_size: int
    sizes: Mapping[str, int]
    columns: Mapping[str, Sequence[int]]
    vpp: int | None = None
    nodes: Sequence[str] | None = None
    names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        _check_per_rank("nodes", self.nodes, self.world_size)
        _check_per_rank("names", self.names, self.world_size)
        immutable = {
            "sizes": FrozenMap(self.sizes),
            "columns": FrozenMap((axis, tuple(column)) for axis, column in self.columns.items()),
            "nodes": None if self.nodes is None else tuple(self.nodes),
            "names": None if self.names is None else tuple(self.names),
        }
        for name, value in immutable.items():
            object.__setattr__(self, name, value)
        _check_placed(self.sizes, (*self.dense_axes, *self.expert_axes))
        for grid in filter(None, (self.dense_axes, self.expert_axes)):
            check_full_grid(grid, self.sizes, self.columns, self.world_size, self.label)

    @classmethod
    def from_layout(
        cls, layout: ParallelLayout, nodes: Sequence[str] | None = None, names: Sequence[str] | None = None
    ) -> Topology:
        """The topology of ranks that stand in the layout's own order; `nodes` and `names` by rank."""
        columns = {axis: layout.column(axis) for axis in layout.sizes}
        return cls(layout.world_size, layout.sizes, columns, vpp=layout.vpp, nodes=nodes, names=names)

    @classmethod
    def from_infos(
        cls,
        rank_infos: Sequence[DistRankInfo],
        global_infos: Sequence[DistGlobalInfo],
        nodes: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        declared: ParallelLayout | None = None,
    ) -> Topology:
        """The topology that the ranks report, one of each info per rank, in rank order.

        Raises TopologyError, naming the ranks concerned, where the ranks disagree on a size, a coordinate or a virtual
        stage lies outside its axis, two ranks stand at one place, or the sizes are not those of the `declared` layout.
        """
        world_size = len(rank_infos)
        if world_size == 0 or len(global_infos) != world_size:
            raise TopologyError(
                f"{world_size} rank infos and {len(global_infos)} global infos; expected one of each per rank",
                world_size=world_size,
            )
        _check_per_rank("nodes", nodes, world_size)
        _check_per_rank("names", names, world_size)

        def label(rank: int) -> str:
            return _label(rank, nodes, names)

        total_info = agreed_sizes(global_infos, label)
        sizes = sizes_of(total_info)
        if declared is not None:
            _check_declared(sizes, total_info.vpp_size, declared)
        columns = columns_of(rank_infos, total_info, label)
        check_virtual_stages(rank_infos, total_info, label)
        return cls(world_size, sizes, columns, vpp=total_info.vpp_size, nodes=nodes, names=names)

    @classmethod
    def flat(cls, world_size: int, nodes: Sequence[str] | None = None, names: Sequence[str] | None = None) -> Topology:
        """The topology of ranks that know no axes: each stands at its own index on the axis "rank"."""
        if not is_count(world_size):
            raise TopologyError(f"world_size is {world_size!r}; expected a whole number of at least 1")
        return cls(world_size, {RANK_AXIS: world_size}, {RANK_AXIS: range(world_size)}, nodes=nodes, names=names)

    @property
    def dense_axes(self) -> tuple[str, ...]:
        """The axes of the dense grid, which span all ranks: tp, cp, dp, pp and the user's own."""
        return tuple(axis for axis in self.sizes if axis not in EXPERT_AXES)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes of the expert grid, which span all ranks: etp, ep, edp, pp and the user's own; none if unknown."""
        if not all(axis in self.sizes for axis in EXPERT_AXES):
            return ()
        return (*EXPERT_AXES, *(axis for axis in self.dense_axes if axis not in ("tp", "cp", "dp")))

    def size(self, axis: str) -> int:
        """The size of `axis`; TopologyError lists the axes where there is none of that name."""
        if axis == RANK_AXIS:
            return self.world_size
        if axis not in self.sizes:
            raise TopologyError(
                f"the topology has no axis {axis!r}; it has {', '.join(self.sizes)}, and 'rank' for each by itself",
                axis=axis,
                axes=tuple(self.sizes),
            )
        return self.sizes[axis]

    def column(self, axis: str) -> Sequence[int]:
        """The index of every rank on `axis`, by rank."""
        self.size(axis)
        return range(self.world_size) if axis == RANK_AXIS else self.columns[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on every axis, dense and expert."""
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank!r} is none of the {self.world_size} ranks", rank=rank)
        return {axis: column[rank] for axis, column in self.columns.items()}

    def select(self, **coordinates: int) -> tuple[int, ...]:
        """The ranks that stand at these coordinates, in rank order; a negative index counts from the end of its axis.

        Raises TopologyError for an unknown axis, an index outside its axis, and dense and expert coordinates that no
        rank has together.
        """
        ranks: Iterable[int] = range(self.world_size)
        for axis, index in coordinates.items():
            size = self.size(axis)
            wanted = from_end(index, size)
            if wanted is None:
                raise TopologyError(
                    f"{axis}={index!r} lies outside axis {axis} of size {size} ({span_text(size)})",
                    axis=axis,
                    index=index,
                )
            column = self.column(axis)
            ranks = [rank for rank in ranks if column[rank] == wanted]
        selected = tuple(ranks)
        if not selected:
            raise TopologyError(f"no rank stands at {place_text(coordinates)}: these axes are not independent")
        return selected

    def shard_count(self, axes: Sequence[str]) -> int:
        """How many shards a batch has when it is split over `axes`; 1 for no axes."""
        return total(self._checked(axes), {axis: self.size(axis) for axis in self._checked(axes)})

    def shard_indices(self, axes: Sequence[str]) -> tuple[int, ...]:
        """For every rank, by rank, the index of its shard when a batch is split over `axes`, the first axis slowest.

        Dense and expert axes may be mixed where every combination of their indices has a rank; TopologyError says so
        where one has none.
        """
        axes = self._checked(axes)
        if not axes:
            return (0,) * self.world_size
        sizes = {axis: self.size(axis) for axis in axes}
        indices = places(axes, sizes, {axis: self.column(axis) for axis in axes})
        if not any(set(axes) <= set(grid) for grid in (self.dense_axes, self.expert_axes)):
            self._check_independent(axes, sizes, indices)
        return tuple(indices)

    def describe(self, by: Literal["stage", "node", "rank"] | None = None, max_rows: int = 16) -> str:
        """The topology as text for people: replicas by pipeline stage, a row per node, or a row per rank.

        Without `by`, the stages, and the nodes where they are known. A table longer than `max_rows` leaves out rows
        before its last ones. Raises TopologyError for an unknown `by`, and for "node" where nodes are not known.
        """
        return describe(self, by, max_rows)

    def label(self, rank: int) -> str:
        """How messages call a rank: its number, and its name and node where known."""
        return _label(rank, self.nodes, self.names)

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items() if axis != RANK_AXIS)
        return f"Topology({', '.join(filter(None, (f'world_size={self.world_size}', sizes)))})"

    def _checked(self, axes: Sequence[str]) -> tuple[str, ...]:
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        if len(set(axes)) < len(axes) or (RANK_AXIS in axes and len(axes) > 1):
            raise TopologyError(
                f"cannot split over {', '.join(axes)}: name each axis once, and 'rank' by itself", axes=axes
            )
        return axes

    def _check_independent(self, axes: Sequence[str], sizes: Mapping[str, int], indices: Sequence[int]) -> None:
        found, expected = len(set(indices)), total(axes, sizes)
        if found < expected:
            raise TopologyError(
                f"cannot split over {', '.join(axes)}: of {product_text(axes, sizes)} = {expected} shards only {found} "
                "would have a rank, since dense and expert axes overlap; split over the axes of one grid: "
                f"{', '.join(self.dense_axes)} or {', '.join(self.expert_axes)}",
                axes=tuple(axes),
            )


def _check_per_rank(what: str, values: Sequence[str] | None, world_size: int) -> None:
    if values is not None and len(values) != world_size:
        raise TopologyError(
            f"{len(values)} {what} for {world_size} ranks; expected one per rank", world_size=world_size
        )


def _check_placed(sizes: Mapping[str, int], axes: Sequence[str]) -> None:
    loose = [axis for axis in sizes if axis not in axes]
    if loose or not axes:
        raise TopologyError(
            f"axes {', '.join(sizes) or '(none)'} make no grid; expected at least one axis outside the expert grid, "
            f"and all of {', '.join(EXPERT_AXES)} or none of them",
            axes=tuple(sizes),
        )


def _check_declared(sizes: Mapping[str, int], vpp: int | None, declared: ParallelLayout) -> None:
    reported: dict[str, int | None] = {**sizes, "vpp": vpp}
    expected: dict[str, int | None] = {**declared.sizes, "vpp": declared.vpp}
    if declared.ep == 1 and "ep" not in reported:
        expected = {axis: size for axis, size in expected.items() if axis not in EXPERT_AXES}
    differing = [axis for axis in {**expected, **reported} if reported.get(axis) != expected.get(axis)]
    if differing:
        told = ", ".join(f"{axis} {reported.get(axis)} (declared {expected.get(axis)})" for axis in differing)
        raise TopologyError(
            f"the ranks report other sizes than the layout declares: {told}",
            axes=tuple(differing),
            reported=reported,
            declared=expected,
        )


def _label(rank: int, nodes: Sequence[str] | None, names: Sequence[str] | None) -> str:
    known = [*([names[rank]] if names else []), *([f"on node {nodes[rank]}"] if nodes else [])]
    return f"rank {rank} ({' '.join(known)})" if known else f"rank {rank}"
