"""The names of the axes, the two grids that they form, and how messages write axes, ranks and coordinates.

Megatron arranges the same ranks in two grids: the dense grid (tp, cp, dp, pp) for attention and dense layers, and the
expert grid (etp, ep, edp, pp) for mixture-of-experts layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

V = TypeVar("V")

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp")
RANK_AXIS = "rank"
RESERVED_NAMES = frozenset((*DENSE_AXES, *EXPERT_AXES, RANK_AXIS, "vpp", "world_size", "order", "extra"))


class FrozenMap(dict[str, V]):
    """A dict that cannot be changed, and that is hashable if its values are."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def _changed(self, *arguments: Any, **items: V) -> NoReturn:
        raise TypeError(f"{dict(self)} is immutable: change a copy of it, dict(...)")

    __setitem__ = __delitem__ = __ior__ = pop = popitem = setdefault = update = clear = _changed

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMap, (dict(self),)


def dense_grid(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of the dense grid: tp, cp, dp, pp and user-defined axes, in the order of ``sizes``."""
    return tuple(axis for axis in sizes if axis not in EXPERT_AXES)


def expert_grid(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of the expert grid: etp, ep, edp, pp and user-defined axes; empty if ``sizes`` lacks experts."""
    if not all(axis in sizes for axis in EXPERT_AXES):
        return ()
    return (*EXPERT_AXES, *(axis for axis in dense_grid(sizes) if axis not in ("tp", "cp", "dp")))


def is_count(value: object) -> bool:
    """Return whether ``value`` is an int of at least 1. A bool does not count."""
    return type(value) is int and value >= 1


def grid_size(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return the product of the sizes of ``axes``."""
    return math.prod(sizes[axis] for axis in axes)


def product_text(axes: Iterable[str], sizes: Mapping[str, int]) -> str:
    """Return the sizes as arithmetic: ``tp 4 x pp 2 x cp 1``."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in axes)


def coordinates_text(coordinates: Mapping[str, int]) -> str:
    """Return coordinates in the form of keyword arguments: ``tp=1, dp=0``."""
    return ", ".join(f"{axis}={index}" for axis, index in coordinates.items())


def span_text(size: int) -> str:
    """Return the valid indices of an axis of ``size``: ``0 to 3``."""
    return f"0 to {size - 1}" if size > 1 else "only 0"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 3, 5 and 9``; past eight ranks, the first seven and the number of the others."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(str(rank) for rank in ranks[:7])} and {len(ranks) - 7:,} more"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"
