"""Split n rows over k shards so that results can be restored: contiguous, padded, or balanced by row length.

Pure arithmetic on row numbers; the dispatch plan assigns shards to ranks. Shard ``i`` of a contiguous partition starts
at row ``i * n // k``: shards differ by at most one row, and no shard is longer than the last one. A shard that needs
a padding row takes the row that follows its last one. It stays a range, so it is a view of the batch and not a copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import Literal, NamedTuple

from mcontroller.balance import balance
from mcontroller.errors import DataError

Shard = range | tuple[int, ...]
"""Row numbers of one shard: a range if they are consecutive."""

Padding = Literal["spread", "repeat", "zero_loss", "none"]
"""How to pad shards; see ``split_rows``."""


class Restoration(NamedTuple):
    """How to restore the caller's rows from the results of the shards.

    Attributes:
        keep: number of leading rows to keep of every shard's result; the rest is padding.
        order: rows of the joined result in the caller's order; None if they are in that order already.
    """

    keep: tuple[int, ...]
    order: tuple[int, ...] | None


@dataclass(frozen=True)
class Partition:
    """Assignment of the caller's rows to shards.

    Attributes:
        size: number of the caller's rows.
        shards: row numbers of every shard, a ``range`` if they are consecutive.
        pads: how many rows at the end of every shard are padding: repeats of rows that are in some shard already,
            whose results are dropped.
        zero_loss: whether padding rows must not count in a loss.
    """

    size: int
    shards: tuple[Shard, ...]
    pads: tuple[int, ...]
    zero_loss: bool = False

    def unpadded_rows(self, shard: int) -> Shard:
        """Return the caller's rows in a shard without padding; every row is in exactly one shard."""
        rows = self.shards[shard]
        return rows[: len(rows) - self.pads[shard]]

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """Position of each of the caller's rows in the joined shards without padding; None if they are in order."""
        rows = list(chain.from_iterable(map(self.unpadded_rows, range(len(self.shards)))))
        ordered = list(range(self.size))
        return None if rows == ordered else tuple(sorted(ordered, key=rows.__getitem__))

    def restore(self, lengths: Sequence[int]) -> Restoration:
        """Return how to restore the caller's rows from the results of the shards.

        Every row sent to a shard must come back as the same number of rows, next to each other: one, none, or several
        (such as n answers to a prompt). Without padding, and if the shards are in the caller's order, any lengths are
        accepted.

        Args:
            lengths: number of rows of every shard's result.

        Raises:
            DataError: if there is not one length per shard, or padding or order cannot be undone; names the shard.
        """
        if len(lengths) != len(self.shards):
            raise DataError(
                f"{len(lengths)} results for {len(self.shards)} shards: expected one length per shard",
                lengths=tuple(lengths),
                shards=len(self.shards),
            )
        if self.order is None and not any(self.pads):
            return Restoration(tuple(lengths), None)
        times = [self._rows_per_row(shard, length) for shard, length in enumerate(lengths)]
        keep = tuple(count * len(self.unpadded_rows(shard)) for shard, count in enumerate(times))
        if self.order is None or not any(keep):
            return Restoration(keep, None)
        if all(count == 1 for shard, count in enumerate(times) if self.shards[shard]):
            return Restoration(keep, self.order)
        blocks: list[range] = [range(0)] * self.size
        position = 0
        for shard, count in enumerate(times):
            for row in self.unpadded_rows(shard):
                blocks[row] = range(position, position + count)
                position += count
        return Restoration(keep, tuple(chain.from_iterable(blocks)))

    def _rows_per_row(self, shard: int, length: int) -> int:
        sent, pad = len(self.shards[shard]), self.pads[shard]
        times, rest = divmod(length, sent) if sent else (0, length)
        if rest:
            raise DataError(
                f"shard {shard} got {sent} rows, {pad} of them padding, and returned {length}: "
                f"return a multiple of {sent} rows, or call without padding and balance",
                shard=shard,
                sent=sent,
                padding=pad,
                returned=length,
            )
        return times


def contiguous(n: int, k: int) -> Partition:
    """Return consecutive shards that differ by at most one row; some are empty if n < k.

    Args:
        n: number of rows.
        k: number of shards.

    Raises:
        DataError: if ``n`` is negative, or ``k`` less than 1.
    """
    return _ranges(n, k, 0)


def padded(n: int, k: int, *, zero_loss: bool = False) -> Partition:
    """Return consecutive shards of ``ceil(n / k)`` rows each, at most one of them padding; all empty if n == 0.

    Args:
        n: number of rows.
        k: number of shards.
        zero_loss: whether padding rows must not count in a loss.

    Raises:
        DataError: if ``n`` is negative, or ``k`` less than 1.
    """
    return _ranges(n, k, -(-n // max(k, 1)), zero_loss)


@lru_cache(maxsize=64)
def _ranges(n: int, k: int, least: int, zero_loss: bool = False) -> Partition:
    _check_counts(n, k)
    bounds = [i * n // k for i in range(k + 1)]
    sizes = [stop - start for start, stop in pairwise(bounds)]
    least = min(least, n)
    shards = tuple(range(start, start + max(rows, least)) for start, rows in zip(bounds, sizes, strict=False))
    return Partition(n, shards, tuple(max(least - rows, 0) for rows in sizes), zero_loss)


_FINENESS = 1 << 30
"""The largest length in units, of lengths that are no integers."""


def balanced(
    lengths: Sequence[float],
    k: int,
    groups: Sequence[Hashable] | None = None,
    *,
    within: Sequence[Hashable] | None = None,
    padding: Padding = "spread",
) -> Partition:
    """Return shards whose sums of ``lengths`` are nearly equal, each with its rows in the caller's order.

    Args:
        lengths: length of every row, such as its number of tokens or its cost.
        k: number of shards.
        groups: a label per row, such as the id of its prompt. Rows with the same label stay in one shard.
        within: a label per row, such as its mini-batch: rows with the same label are balanced by themselves, at equal
            numbers of rows or groups.
        padding: as in ``split_rows``; padding rows repeat the shortest row.

    Raises:
        DataError: if ``k`` is less than 1, a length is negative, or the numbers of lengths and labels differ.
    """
    n = len(lengths)
    _check_counts(n, k)
    if n and min(lengths) < 0:
        row = next(row for row, length in enumerate(lengths) if length < 0)
        raise DataError(f"row {row} has length {lengths[row]}: expected at least 0", row=row, length=lengths[row])
    unit = max(lengths) / _FINENESS if any(length % 1 for length in lengths) else 1
    sizes = [round(length / unit) for length in lengths]
    _check_labels(within, "labels of rows to balance by themselves", n)
    _check_labels(groups, "group labels", n)
    filled: list[list[int]] = [[] for _ in range(k)]
    for rows_of in _members(within or [None] * n).values():
        units = [[row] for row in rows_of] if groups is None else list(_members(groups, rows_of).values())
        weights = [sum(sizes[row] for row in unit) for unit in units]
        bins = balance(weights, k, within is not None)
        _add([[row for unit in items for row in units[unit]] for items in bins], filled, sizes)
    chosen = sorted((tuple(sorted(rows)) for rows in filled), key=lambda rows: rows[0] if rows else n)
    least = {"none": 0, "spread": 1}.get(padding, max(map(len, chosen)))
    filler = min(range(n), key=sizes.__getitem__, default=0)
    pads = tuple(max(least - len(rows), 0) if n else 0 for rows in chosen)
    shards = tuple(_compact(rows + (filler,) * pad) for rows, pad in zip(chosen, pads, strict=True))
    return Partition(n, shards, pads, padding == "zero_loss")


def _add(bins: Sequence[list[int]], filled: list[list[int]], lengths: Sequence[int]) -> None:
    """Add the rows of each bin to one of the shards: the heaviest to the lightest shard with the fewest rows."""

    def size(rows: Sequence[int]) -> tuple[int, int]:
        return len(rows), sum(lengths[row] for row in rows)

    for rows, shard in zip(sorted(bins, key=size, reverse=True), sorted(filled, key=size), strict=True):
        shard += rows


def _check_labels(labels: Sequence[Hashable] | None, name: str, n: int) -> None:
    if labels is not None and len(labels) != n:
        raise DataError(f"{len(labels)} {name} for {n} rows: expected one per row", groups=len(labels), rows=n)


def _members(labels: Sequence[Hashable], rows: Sequence[int] | None = None) -> dict[Hashable, list[int]]:
    """Return the rows of each label, in the order of its first row."""
    members: dict[Hashable, list[int]] = {}
    for row in range(len(labels)) if rows is None else rows:
        members.setdefault(labels[row], []).append(row)
    return members


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
    lengths: Sequence[float] | None = None,
    groups: Sequence[Hashable] | None = None,
    within: Sequence[Hashable] | None = None,
    together: int = 1,
) -> Partition:
    """Partition n rows over k shards as a call requests it.

    Args:
        n: number of rows. With 0, every shard is empty, whatever the padding.
        k: number of shards.
        padding: "spread" adds one row to each shard that would be empty, so that no rank is missing from a collective,
            and nothing else; so does None (a call passes "repeat" for a batch with ``auto_padding``). "repeat" repeats
            rows until all shards have the same length. "zero_loss" does the same and marks the padding rows as not
            counting in a loss. "none" leaves shards empty if n < k.
        lengths: length of every row, such as its number of tokens; balances their sums.
        groups: a label per row; rows with the same label stay in one shard.
        within: a label per row; rows with the same label are balanced by themselves.
        together: every so many consecutive rows stay next to each other in one shard, padding rows too; they have the
            labels of the first of them.

    Raises:
        DataError: if ``n`` or ``k`` is out of range, the numbers of rows, lengths and labels
            differ, or ``n`` is not a multiple of ``together``.
    """
    if together != 1:
        return _together(n, k, together, padding, lengths, groups, within)
    padding = "spread" if padding is None else padding
    if lengths is not None and len(lengths) != n:
        raise DataError(f"{len(lengths)} lengths for {n} rows: expected one per row", lengths=len(lengths), rows=n)
    if lengths is not None or groups is not None or within is not None:
        lengths = [1] * n if lengths is None else lengths
        return balanced(lengths, k, groups, within=within, padding=padding)
    if padding in ("repeat", "zero_loss"):
        return padded(n, k, zero_loss=padding == "zero_loss")
    return _ranges(n, k, 1 if padding == "spread" else 0)


def _together(
    n: int,
    k: int,
    size: int,
    padding: Padding | None,
    lengths: Sequence[float] | None,
    groups: Sequence[Hashable] | None,
    within: Sequence[Hashable] | None,
) -> Partition:
    if n % size:
        raise DataError(f"{n} rows, of which every {size} stay together: expected a multiple of {size}", rows=n)
    sums = None if lengths is None else [sum(lengths[at : at + size]) for at in range(0, n, size)]
    labels = [None if label is None else label[::size] for label in (groups, within)]
    units = split_rows(n // size, k, padding=padding, lengths=sums, groups=labels[0], within=labels[1])
    shards = [tuple(row for unit in shard for row in range(unit * size, unit * size + size)) for shard in units.shards]
    return Partition(n, tuple(map(_compact, shards)), tuple(pad * size for pad in units.pads), units.zero_loss)


def _check_counts(n: int, k: int) -> None:
    if n < 0 or k < 1:
        raise DataError(f"{n} rows over {k} shards: expected at least 0 rows and 1 shard", rows=n, shards=k)
