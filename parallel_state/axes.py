"""Axes: their names, how an index on one is read, and how axes and ranks are written in messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

V = TypeVar("V")

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp")
RANK_AXIS = "rank"
RESERVED_NAMES = frozenset((*DENSE_AXES, *EXPERT_AXES, RANK_AXIS, "vpp", "world_size", "order", "extra"))


class FrozenMap(Mapping[str, V]):
    """A mapping that cannot be changed, can be hashed where its values can, and survives pickling."""

    __slots__ = ("_data",)
    _data: dict[str, V]

    def __init__(self, items: Mapping[str, V] | Iterable[tuple[str, V]] = ()) -> None:
        object.__setattr__(self, "_data", dict(items))

    def __getitem__(self, key: str) -> V:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __hash__(self) -> int:
        return hash(frozenset(self._data.items()))

    def __repr__(self) -> str:
        return repr(self._data)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a FrozenMap cannot be changed (attribute {name!r})")

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMap, (self._data,)


def is_count(value: object) -> bool:
    """Whether `value` is a whole number of at least 1 (a bool is none)."""
    return type(value) is int and value >= 1


def from_end(index: int, size: int) -> int | None:
    """`index` on an axis of `size`, counted from the end where negative; None where it lies outside."""
    if type(index) is not int or not -size <= index < size:
        return None
    return index % size


def total(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """How many places the axes span together."""
    return math.prod(sizes[axis] for axis in axes)


def product_text(axes: Iterable[str], sizes: Mapping[str, int]) -> str:
    """The sizes as arithmetic: ``tp 4 x pp 2 x cp 1``."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in axes)


def place_text(coordinates: Mapping[str, int]) -> str:
    """Coordinates as a call would name them: ``tp=1, dp=0``."""
    return ", ".join(f"{axis}={index}" for axis, index in coordinates.items())


def span_text(size: int) -> str:
    """The indices of an axis of `size`: ``0 to 3``."""
    return f"0 to {size - 1}" if size > 1 else "only 0"


def ranks_text(ranks: Sequence[int], limit: int = 8) -> str:
    """``rank 3``, ``ranks 3, 5 and 9``, or, past `limit`, the first few and how many more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > limit:
        shown = ", ".join(str(rank) for rank in ranks[: limit - 1])
        return f"ranks {shown} and {len(ranks) - limit + 1:,} more"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"
