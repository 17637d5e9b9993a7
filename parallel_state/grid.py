"""The check that ranks form a full grid: every place taken, each by one rank. What is wrong is told by rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from parallel_state.axes import is_count, place_text, product_text, ranks_text, span_text, total
from parallel_state.errors import TopologyError

Label = Callable[[int], str]
Columns = Mapping[str, Sequence[int]]


def places(axes: Sequence[str], sizes: Mapping[str, int], columns: Columns) -> list[int]:
    """One number per rank for its place on `axes`, the first axis slowest."""
    numbers: list[int] | None = None
    for axis in axes:
        size, column = sizes[axis], columns[axis]
        if numbers is None:
            numbers = list(column)
        elif size > 1:
            numbers = [number * size + index for number, index in zip(numbers, column, strict=True)]
    return numbers or []


def check_full_grid(
    axes: Sequence[str], sizes: Mapping[str, int], columns: Columns, world_size: int, label: Label
) -> None:
    """TopologyError unless the ranks take every place of the grid of `axes`, one rank each."""
    for axis in axes:
        if not is_count(sizes[axis]):
            raise TopologyError(f"axis {axis} has size {sizes[axis]!r}; expected at least 1", axis=axis)
        if len(columns.get(axis, ())) != world_size:
            raise TopologyError(
                f"axis {axis} has {len(columns.get(axis, ()))} indices for {world_size} ranks; expected one per rank",
                axis=axis,
            )
    if total(axes, sizes) != world_size:
        raise TopologyError(
            f"{product_text(axes, sizes)} = {total(axes, sizes)} places, but {world_size} ranks report",
            world_size=world_size,
            sizes={axis: sizes[axis] for axis in axes},
        )
    for axis in axes:
        _check_column(axis, sizes[axis], columns[axis], label)
    taken = places(axes, sizes, columns)
    if len(set(taken)) != world_size:
        raise _not_one_each(axes, sizes, columns, taken, label)


def _check_column(axis: str, size: int, column: Sequence[int], label: Label) -> None:
    if set(map(type, column)) == {int} and min(column) >= 0 and max(column) < size:
        return
    wrong = tuple(rank for rank, index in enumerate(column) if type(index) is not int or not 0 <= index < size)
    more = f"; likewise {ranks_text(wrong[1:])}" if len(wrong) > 1 else ""
    raise TopologyError(
        f"{label(wrong[0])} reports {axis}_rank {column[wrong[0]]!r}, outside axis {axis} of size {size} "
        f"({span_text(size)}){more}",
        ranks=wrong,
        axis=axis,
    )


def _not_one_each(
    axes: Sequence[str], sizes: Mapping[str, int], columns: Columns, taken: Sequence[int], label: Label
) -> TopologyError:
    """The error for places that are taken twice while as many others are empty."""
    ranks_at: dict[int, list[int]] = defaultdict(list)
    for rank, place in enumerate(taken):
        ranks_at[place].append(rank)
    crowded = {place: ranks for place, ranks in ranks_at.items() if len(ranks) > 1}
    empty = [place for place in range(len(taken)) if place not in ranks_at]
    place, ranks = next(iter(crowded.items()))
    message = (
        f"{ranks_text(ranks)} {'both' if len(ranks) == 2 else 'all'} stand at {_place_text(place, axes, sizes)}, and "
        f"no rank stands at {_place_text(empty[0], axes, sizes)}"
    )
    if len(empty) > 1:
        message += f"; in all {len(crowded):,} places are taken more than once and {len(empty):,} by none"
        involved = [rank for ranks in crowded.values() for rank in ranks]
    else:
        involved = ranks
        odd = _odd_one_out(ranks, _coordinates(empty[0], axes, sizes), sizes, columns)
        message += f"; by the order of all other ranks, {label(odd)} is the wrong one" if odd is not None else ""
    return TopologyError(message, ranks=tuple(involved), empty_places=len(empty))


def _odd_one_out(
    candidates: Sequence[int], missing: Mapping[str, int], sizes: Mapping[str, int], columns: Columns
) -> int | None:
    """The one candidate whose move to the missing place makes every axis regular in rank order, if there is one."""
    fitting = []
    for rank in candidates:
        moved = {axis: [*columns[axis][:rank], index, *columns[axis][rank + 1 :]] for axis, index in missing.items()}
        if all(_is_regular(column, sizes[axis]) for axis, column in moved.items()):
            fitting.append(rank)
    return fitting[0] if len(fitting) == 1 else None


def _is_regular(column: Sequence[int], size: int) -> bool:
    """Whether the index goes up by one every so many ranks, round and round."""
    stride = column.index(1) if size > 1 else 1
    return stride > 0 and all(index == rank // stride % size for rank, index in enumerate(column))


def _coordinates(place: int, axes: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    indices = {}
    for axis in reversed(axes):
        place, indices[axis] = divmod(place, sizes[axis])
    return {axis: indices[axis] for axis in axes}


def _place_text(place: int, axes: Sequence[str], sizes: Mapping[str, int]) -> str:
    return place_text(_coordinates(place, axes, sizes))
