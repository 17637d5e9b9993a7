"""Split n rows over k shards, always restorable: contiguous, padded, or balanced by the length of the rows.

Pure arithmetic on row numbers; who gets which shard is decided elsewhere. Shard ``i`` of a contiguous partition starts
at row ``i * n // k``: no two shards differ by more than one row, and the last one is never the shorter. A shard that
needs one row more than its own, because its length is to equal the others' or because it would be empty, takes the row
that follows: it stays a range, which is a view of the batch and not a copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import Literal, NamedTuple, get_args

from mcontroller.balance import balance
from mcontroller.errors import DataError

Shard = range | tuple[int, ...]
Padding = Literal["spread", "repeat", "zero_loss", "none"]


class Restoration(NamedTuple):
    """How to put results back: the leading rows to keep of every shard's result, then the order of what is joined.

    ``order`` lists rows of the joined result in the caller's order; None: they are in it already.
    """

    keep: tuple[int, ...]
    order: tuple[int, ...] | None


@dataclass(frozen=True)
class Partition:
    """Which of the caller's ``size`` rows stand in which shard.

    ``shards[i]`` holds row numbers, a ``range`` where they are consecutive; the last ``pads[i]`` of them are padding:
    rows that stand in some shard for themselves already, and whose results are dropped. ``zero_loss`` says that padding
    rows must not count in a loss.
    """

    size: int
    shards: tuple[Shard, ...]
    pads: tuple[int, ...]
    zero_loss: bool = False

    def rows(self, shard: int) -> Shard:
        """The caller's rows in a shard, padding last."""
        return self.shards[shard]

    def own(self, shard: int) -> Shard:
        """The caller's rows in a shard, without padding; over all shards every row stands exactly once."""
        rows = self.shards[shard]
        return rows[: len(rows) - self.pads[shard]]

    @cached_property
    def is_padded(self) -> bool:
        return any(self.pads)

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether every shard is a range, so that it can be a view of the batch."""
        return all(isinstance(rows, range) for rows in self.shards)

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """For every row of the caller its place among the joined own rows; None where that is its own number."""
        if self._is_ordered():
            return None
        places = [0] * self.size
        for place, row in enumerate(chain.from_iterable(map(self.own, range(len(self.shards))))):
            places[row] = place
        return tuple(places)

    def _is_ordered(self) -> bool:
        expected = 0
        for shard in range(len(self.shards)):
            rows = self.own(shard)
            if len(rows) and rows != range(expected, expected + len(rows)) and not _is_run(rows, expected):
                return False
            expected += len(rows)
        return True

    def restore(self, lengths: Sequence[int]) -> Restoration:
        """How to put together the caller's result from results of ``lengths[i]`` rows for shard ``i``.

        Every row given to a shard must come back as the same number of rows, next to each other: one, none, or several
        (as when a prompt is answered n times). Raises DataError naming the shard where padding or order cannot be
        undone; without padding and in the caller's order any lengths will do.
        """
        if len(lengths) != len(self.shards):
            raise DataError(
                f"{len(lengths)} results for {len(self.shards)} shards: give one length for every shard",
                lengths=tuple(lengths),
                shards=len(self.shards),
            )
        if self.order is None and not self.is_padded:
            return Restoration(tuple(lengths), None)
        times = [self._rows_per_row(shard, length) for shard, length in enumerate(lengths)]
        keep = tuple(count * len(self.own(shard)) for shard, count in enumerate(times))
        if self.order is None or not any(keep):
            return Restoration(keep, None)
        if all(count == 1 for shard, count in enumerate(times) if self.shards[shard]):
            return Restoration(keep, self.order)
        blocks: list[range] = [range(0)] * self.size
        place = 0
        for shard, count in enumerate(times):
            for row in self.own(shard):
                blocks[row] = range(place, place + count)
                place += count
        return Restoration(keep, tuple(chain.from_iterable(blocks)))

    def _rows_per_row(self, shard: int, length: int) -> int:
        given, pad = len(self.shards[shard]), self.pads[shard]
        times, rest = divmod(length, given) if given else (0, length)
        if rest:
            raise DataError(
                f"shard {shard} was given {given} rows, {pad} of them padding, and returned {length}: its rows cannot "
                f"be told apart; return a multiple of {given} rows, or call without padding and balance",
                shard=shard,
                given=given,
                padding=pad,
                returned=length,
            )
        return times


def _is_run(rows: Shard, start: int) -> bool:
    return isinstance(rows, tuple) and rows[0] == start and rows == tuple(range(start, start + len(rows)))


def contiguous(n: int, k: int) -> Partition:
    """Consecutive shards that differ by at most one row; where n < k some are empty."""
    return _ranges(n, k, 0)


def padded(n: int, k: int, *, zero_loss: bool = False) -> Partition:
    """Consecutive shards of ``ceil(n / k)`` rows each, at most one of them padding; n == 0 gives empty shards."""
    return _ranges(n, k, -(-n // max(k, 1)), zero_loss)


@lru_cache(maxsize=64)
def _ranges(n: int, k: int, least: int, zero_loss: bool = False) -> Partition:
    _check_counts(n, k)
    bounds = [i * n // k for i in range(k + 1)]
    own = [stop - start for start, stop in pairwise(bounds)]
    least = min(least, n)
    shards = tuple(range(start, start + max(rows, least)) for start, rows in zip(bounds, own, strict=False))
    return Partition(n, shards, tuple(max(least - rows, 0) for rows in own), zero_loss)


def balanced(
    lengths: Sequence[int],
    k: int,
    groups: Sequence[Hashable] | None = None,
    *,
    equal_size: bool = False,
    padding: Padding = "spread",
) -> Partition:
    """Shards whose sums of ``lengths`` are nearly equal, each with its rows in the caller's order.

    ``groups`` gives every row a label (a prompt's id, say): rows of one label stay in one shard. ``equal_size``: no
    shard has more rows than another by more than one; with groups, which must then be of one size, by more than one
    group. ``padding`` as in ``split_rows``; padding rows repeat the shortest row. Raises DataError on a negative length
    or when the numbers of lengths and groups differ.
    """
    n, lengths = len(lengths), list(map(int, lengths))
    _check_counts(n, k)
    if n and min(lengths) < 0:
        row = next(row for row, length in enumerate(lengths) if length < 0)
        raise DataError(f"row {row} has length {lengths[row]}: give 0 or more", row=row, length=lengths[row])
    units = [[row] for row in range(n)] if groups is None else _grouped(groups, n, equal_size)
    weights = [sum(lengths[row] for row in unit) for unit in units]
    chosen = [tuple(sorted(row for unit in items for row in units[unit])) for items in balance(weights, k, equal_size)]
    chosen.sort(key=lambda rows: rows[0] if rows else n)
    least = {"none": 0, "spread": 1}.get(padding, max(map(len, chosen)))
    filler = min(range(n), key=lengths.__getitem__, default=0)
    pads = tuple(max(least - len(rows), 0) if n else 0 for rows in chosen)
    shards = tuple(_compact(rows + (filler,) * pad) for rows, pad in zip(chosen, pads, strict=True))
    return Partition(n, shards, pads, padding == "zero_loss")


def _grouped(groups: Sequence[Hashable], n: int, equal_size: bool) -> list[list[int]]:
    if len(groups) != n:
        raise DataError(f"{len(groups)} group labels for {n} rows: give one for every row", groups=len(groups), rows=n)
    members: dict[Hashable, list[int]] = {}
    for row, label in enumerate(groups):
        members.setdefault(label, []).append(row)
    sizes = {len(rows) for rows in members.values()}
    if equal_size and len(sizes) > 1:
        raise DataError(
            f"groups of {min(sizes)} to {max(sizes)} rows cannot be kept whole in shards of equal size: "
            "give groups of one size, or equal_size=False",
            sizes=sorted(sizes),
        )
    return list(members.values())


def _compact(rows: tuple[int, ...]) -> Shard:
    if not rows:
        return range(0)
    run = range(rows[0], rows[0] + len(rows))
    return run if rows[-1] == run[-1] and rows == tuple(run) else rows


def split_rows(
    n: int,
    k: int,
    *,
    padding: Padding | None = None,
    lengths: Sequence[int] | None = None,
    groups: Sequence[Hashable] | None = None,
    equal_size: bool = False,
) -> Partition:
    """The partition of n rows over k shards that a call asks for; never changes or needs the rows themselves.

    ``padding``: "spread" (the default, also None) repeats a row for a shard that would have none, so that none is
    missing from a collective computation, and adds nothing else; "repeat" makes all shards equally long by repeating
    rows; "zero_loss" does the same and marks the padding rows as not to be counted in a loss; "none" leaves shards
    empty when n < k. With n == 0 there is no row to repeat: every shard is empty, whatever the padding.

    ``lengths`` (tokens per row) balances the sums of lengths; ``groups`` keeps rows of one label together;
    ``equal_size`` balances at equal numbers of rows. Raises DataError on numbers that do not fit together.
    """
    padding = "spread" if padding is None else padding
    if padding not in get_args(Padding):
        raise DataError(f"padding {padding!r}: give one of {', '.join(get_args(Padding))}", padding=padding)
    if lengths is not None and len(lengths) != n:
        raise DataError(f"{len(lengths)} lengths for {n} rows: give one for every row", lengths=len(lengths), rows=n)
    if lengths is not None or groups is not None:
        return balanced([1] * n if lengths is None else lengths, k, groups, equal_size=equal_size, padding=padding)
    if padding in ("repeat", "zero_loss"):
        return padded(n, k, zero_loss=padding == "zero_loss")
    return _ranges(n, k, 1 if padding == "spread" else 0)


def _check_counts(n: int, k: int) -> None:
    if n < 0 or k < 1:
        raise DataError(f"{n} rows over {k} shards: give 0 or more rows and 1 or more shards", rows=n, shards=k)
