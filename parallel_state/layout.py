"""ParallelLayout: declared sizes and order of the axes, and the rank arithmetic that follows from them.

The arithmetic is Megatron-Core's. A layout is two grids over the same ranks: the dense grid (tp, cp, dp, pp) for
attention and dense layers, and the expert grid (etp, ep, edp, pp) for mixture-of-experts layers. In both, the first
axis of ``order`` is the one on which neighbouring ranks differ; in the expert grid, etp takes the position of tp in
``order``, and edp that of dp. User-defined axes (``extra``) belong to both grids, as pp does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from parallel_state.axes import (
    DENSE_AXES,
    EXPERT_AXES,
    RESERVED_NAMES,
    FrozenMap,
    grid_size,
    is_count,
    product_text,
    span_text,
)
from parallel_state.errors import LayoutError

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
ORDER_AXES = ("tp", "cp", "ep", "dp", "pp")
_EXPERT_NAME = {"tp": "etp", "dp": "edp"}


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes and order of the axes of ``world_size`` ranks, as ``megatron.core.parallel_state`` arranges them.

    The sizes of dp and edp follow from the others.

    Attributes:
        world_size: the number of ranks.
        tp: tensor-parallel size.
        pp: number of pipeline stages.
        cp: context-parallel size.
        ep: expert-parallel size.
        etp: tensor-parallel size of the experts; None for ``tp``.
        vpp: number of virtual stages on each pipeline stage; None without virtual stages.
        order: the axes from the fastest to the slowest, joined by ``-``; an axis of size 1 may be left out.
        extra: the sizes of user-defined axes, which ``order`` names too.
        sizes: axis -> size: the dense axes, the user-defined axes, then the expert axes. Derived.
        dense_axes: the axes of the dense grid, the fastest first. Derived.
        expert_axes: the axes of the expert grid, the fastest first. Derived.

    Raises:
        LayoutError: sizes that do not divide the world, an order that leaves out an axis in use, or dense and expert
            grids that do not share their pipeline stages: all that Megatron rejects, with the arithmetic.

    Examples:
        >>> layout = ParallelLayout(world_size=8, tp=2, pp=2)
        >>> layout.dp, layout.coordinates(5)["pp"], layout.groups("dp")
        (2, 1, [[0, 2], [1, 3], [4, 6], [5, 7]])
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None
    order: str = DEFAULT_ORDER
    extra: Mapping[str, int] = FrozenMap()
    sizes: Mapping[str, int] = field(init=False, repr=False, compare=False)
    dense_axes: tuple[str, ...] = field(init=False, repr=False, compare=False)
    expert_axes: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _strides: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_arguments(self)
        order = self.order.lower()
        extra = FrozenMap(self.extra)
        sizes = _derive_sizes(self)
        complete = _complete_order(order, sizes, extra)
        dense = tuple(axis for axis in complete if axis != "ep")
        expert = tuple(_EXPERT_NAME.get(axis, axis) for axis in complete if axis != "cp")
        dense_strides, expert_strides = _strides_of(dense, sizes), _strides_of(expert, sizes)
        derived = {
            "order": order,
            "extra": extra,
            "sizes": sizes,
            "dense_axes": dense,
            "expert_axes": expert,
            "_strides": FrozenMap({**expert_strides, **dense_strides}),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        _check_pipeline_order(self)
        for axis in ("pp", *extra):
            if sizes[axis] > 1 and dense_strides[axis] != expert_strides[axis]:
                raise _grids_disagree(self, axis)

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense grid."""
        return self.sizes["dp"]

    @property
    def edp(self) -> int:
        """Data-parallel size of the expert grid: the number of ranks with the same expert weights."""
        return self.sizes["edp"]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of ``rank`` on every axis, dense and expert.

        Raises:
            LayoutError: there is no such rank.
        """
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank {rank!r} is out of range for {self.world_size} ranks ({span_text(self.world_size)})", rank=rank
            )
        return {axis: rank // self._strides[axis] % size for axis, size in self.sizes.items()}

    def column(self, axis: str) -> tuple[int, ...]:
        """Return the index of every rank on ``axis``, by rank.

        Raises:
            LayoutError: the layout has no such axis.
        """
        self._check_axes((axis,))
        size, stride = self.sizes[axis], self._strides[axis]
        period = [index for index in range(size) for _ in range(stride)]
        return tuple(period * (self.world_size // (size * stride)))

    def groups(self, *axes: str) -> list[list[int]]:
        """Return all groups of ranks that differ on these axes only.

        Groups, and the ranks of each, are in Megatron's order. Mirrors
        ``megatron.core.parallel_state.RankGenerator.get_ranks``.

        Args:
            axes: axes of one grid, as in ``groups("dp", "cp")`` or ``groups("etp", "ep", "pp")``.

        Raises:
            LayoutError: an unknown axis, or axes of different grids.
        """
        self._check_axes(axes)
        grids = self.dense_axes, self.expert_axes
        grid = next((grid for grid in grids if set(axes) <= set(grid)), None)
        if grid is None:
            raise LayoutError(
                f"{', '.join(axes)} are not axes of one grid; expected axes of {', '.join(self.dense_axes)} (dense) or "
                f"of {', '.join(self.expert_axes)} (expert)",
                axes=axes,
            )
        offsets = self._rank_offsets(axis for axis in grid if axis in axes)
        return [[base + offset for offset in offsets] for base in self._rank_offsets(a for a in grid if a not in axes)]

    def _rank_offsets(self, axes: Iterable[str]) -> list[int]:
        """Return the rank offset of every combination of indices on ``axes``, the first axis fastest."""
        offsets = [0]
        for axis in axes:
            stride = self._strides[axis]
            offsets = [index * stride + offset for index in range(self.sizes[axis]) for offset in offsets]
        return offsets

    def _check_axes(self, axes: Sequence[str]) -> None:
        for axis in axes:
            if axis not in self.sizes:
                raise LayoutError(f"the layout has no axis {axis!r}; it has {', '.join(self.sizes)}", axis=axis)


def _check_arguments(layout: ParallelLayout) -> None:
    """Reject sizes that are not positive ints, and user-defined axes with invalid names."""
    for name in layout.extra:
        if not (isinstance(name, str) and name.isidentifier() and name == name.lower()) or name in RESERVED_NAMES:
            raise LayoutError(
                f"extra axis {name!r}: expected a lower-case identifier other than {', '.join(sorted(RESERVED_NAMES))}",
                axis=name,
            )
    counts = {name: getattr(layout, name) for name in ("world_size", "tp", "pp", "cp", "ep", "etp", "vpp")}
    for name, value in {**counts, **layout.extra}.items():
        if not is_count(value) and not (name in ("etp", "vpp") and value is None):
            raise LayoutError(f"{name} is {value!r}; expected an int of at least 1", axis=name, value=value)
    if layout.vpp is not None and layout.pp == 1:
        raise LayoutError(
            f"vpp {layout.vpp} with pp 1: virtual stages interleave a pipeline; leave vpp None or use pp >= 2",
            vpp=layout.vpp,
            pp=layout.pp,
        )


def _derive_sizes(layout: ParallelLayout) -> FrozenMap[int]:
    """Return the sizes of all axes; dp and edp are the quotients of the world size and the other axes."""
    dense = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, **layout.extra}
    expert = {"etp": layout.tp if layout.etp is None else layout.etp, "ep": layout.ep, "pp": layout.pp}
    dp = _quotient(layout.world_size, dense, "dp")
    edp = _quotient(layout.world_size, {**expert, **layout.extra}, "edp")
    known = {**dense, **expert, "dp": dp, "edp": edp}
    return FrozenMap({axis: known[axis] for axis in (*DENSE_AXES, *layout.extra, *EXPERT_AXES)})


def _quotient(world_size: int, sizes: Mapping[str, int], derived: str) -> int:
    product = grid_size(sizes, sizes)
    if world_size % product:
        below = world_size // product * product
        valid = f"{below} or {below + product}" if below else f"{product}"
        raise LayoutError(
            f"{product_text(sizes, sizes)} = {product} does not divide world_size {world_size}; use a world_size of "
            f"{valid}, or sizes whose product divides {world_size} ({derived} is the quotient)",
            world_size=world_size,
            product=product,
            sizes=dict(sizes),
        )
    return world_size // product


def _complete_order(order: str, sizes: Mapping[str, int], extra: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of ``order``, followed by the axes of size 1 that it leaves out."""
    tokens = order.split("-")
    legal = (*ORDER_AXES, *extra)
    for token in tokens:
        if token not in legal or tokens.count(token) > 1:
            problem = "names an axis twice" if token in legal else "names an unknown axis"
            raise LayoutError(
                f"order {order!r} {problem}: {token!r}; expected each of {', '.join(legal)} at most once, joined by "
                "'-' (for user-defined axes: extra={name: size})",
                order=order,
                axis=token,
            )
    for axis in legal:
        names = (axis, _EXPERT_NAME.get(axis, axis))
        used = next((name for name in names if sizes[name] > 1), None)
        if axis not in tokens and used is not None:
            raise LayoutError(
                f"order {order!r} leaves out {axis}, but {used} has size {sizes[used]}; list all axes, from the "
                f"fastest to the slowest, as in {'-'.join(legal)!r}",
                order=order,
                axis=axis,
                size=sizes[used],
            )
    return (*tokens, *(axis for axis in legal if axis not in tokens))


def _strides_of(grid: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    return {axis: grid_size(grid[:position], sizes) for position, axis in enumerate(grid)}


def _check_pipeline_order(layout: ParallelLayout) -> None:
    """Check Megatron's rule: unless pp is the slowest of its axes, dp and edp are equal."""
    order = [axis for axis in layout.order.split("-") if axis not in layout.extra]
    if layout.pp > 1 and order[-1] != "pp" and layout.dp != layout.edp:
        dense = [axis for axis in layout.dense_axes if axis != "dp"]
        expert = [axis for axis in layout.expert_axes if axis != "edp"]
        raise LayoutError(
            f"order {layout.order!r} does not end with pp, so dp and edp must be equal: dp is {layout.world_size} / "
            f"({product_text(dense, layout.sizes)}) = {layout.dp}, edp is {layout.world_size} / "
            f"({product_text(expert, layout.sizes)}) = {layout.edp}; end the order with pp, or use etp x ep = tp x cp",
            order=layout.order,
            dp=layout.dp,
            edp=layout.edp,
        )


def _grids_disagree(layout: ParallelLayout, axis: str) -> LayoutError:
    """Return the error for an order that puts a rank at two indices on ``axis``, which belongs to both grids."""
    steps = []
    for kind, grid in zip(("dense", "expert"), (layout.dense_axes, layout.expert_axes), strict=True):
        faster = grid[: grid.index(axis)]
        arithmetic = f"{product_text(faster, layout.sizes)} = " if faster else ""
        steps.append(f"{arithmetic}{grid_size(faster, layout.sizes)} in the {kind} grid")
    return LayoutError(
        f"the {axis} groups of the dense and the expert grid differ: with order {layout.order!r} neighbours on {axis} "
        f"are this many ranks apart: {', '.join(steps)}; put {axis} after tp, cp, ep and dp",
        order=layout.order,
        axis=axis,
    )
