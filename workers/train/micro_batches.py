"""Which rows of a mini-batch go through the model together: so many rows at a time, or so many tokens.

A padded micro-batch costs rows times the length of its longest row, a packed one the sum of its rows' lengths. Under a
budget of tokens the largest cost is as small as the number of micro-batches allows; padded rows go with rows of similar
length, and each micro-batch is as wide as its own longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from workers.train.batches import TokenBatch
from workers.train.packing import packing_of

__all__ = [
    "MicroBatch",
    "MicroBatchSize",
    "equal_micro_batches",
    "least_count",
    "packed_equal_micro_batches",
    "token_micro_batches",
]


class MicroBatchSize(NamedTuple):
    """The most that one data-parallel rank takes at a time: so many ``rows``, or so many ``tokens`` where not 0.

    Tokens are rows times length, padding included, or the sum of lengths where rows are packed.
    """

    rows: int
    tokens: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together, and where they are from.

    Attributes:
        index: their places among all rows, without the filling at the end of ``rows``.
    """

    rows: TokenBatch
    index: Tensor


def equal_micro_batches(
    rows: TokenBatch, index: Tensor, most: int, micro_batch_size: int, multiple: int = 1
) -> list[MicroBatch]:
    """The rows at ``index`` in micro-batches of one size, of at most ``micro_batch_size`` rows, filled up at the end.

    Args:
        most: the largest number of rows that any data-parallel rank has; it alone decides how many micro-batches
            there are and how large, so that all ranks agree.
        multiple: the number of micro-batches is a multiple of this (pp, under an interleaved schedule).
    """
    count = max(-(-most // micro_batch_size), 1)
    count = -(-count // multiple) * multiple
    size = max(-(-most // count), 1)
    return [_micro_batch(rows, index[at * size : (at + 1) * size], size) for at in range(count)]


def packed_equal_micro_batches(
    rows: TokenBatch, index: Tensor, most: int, micro_batch_size: int, multiple: int = 1, *, length_multiple: int = 1
) -> list[MicroBatch]:
    """As ``equal_micro_batches``, packed: without filling, but for a short row where there would be none."""
    padded = equal_micro_batches(rows, index, most, micro_batch_size, multiple)
    return [_packed(rows, batch.index, _shortest(rows, index), length_multiple) for batch in padded]


def token_micro_batches(
    rows: TokenBatch, index: Tensor, count: int, max_tokens: int, *, length_multiple: int = 1, packed: bool = False
) -> list[MicroBatch]:
    """The rows at ``index`` in ``count`` micro-batches of costs as equal as filling them longest row first makes them.

    Micro-batches beyond the number of rows are a row of filling.

    Args:
        count: at least ``least_count`` of these rows.
        max_tokens: what no micro-batch is more than, unless it is a single row.
        length_multiple: lengths are rounded up to a multiple of this.
        packed: whether a micro-batch costs the sum of its lengths, or rows times the longest.
    """
    widths, by_length = _rounded(rows.lengths[index], length_multiple).sort(descending=True, stable=True)
    groups = _even_groups(widths.tolist(), count, max_tokens, packed)
    groups += [[]] * (count - len(groups))
    parts = [index[by_length[group]] for group in groups]
    shortest = _shortest(rows, index)
    if packed:
        return [_packed(rows, part, shortest, length_multiple) for part in parts]
    return [_micro_batch(rows, part, max(len(part), 1), length_multiple, shortest) for part in parts]


def least_count(lengths: Tensor, max_tokens: int, length_multiple: int = 1, *, packed: bool = False) -> int:
    """How many micro-batches of at most ``max_tokens`` rows of these lengths need; at least 1.

    A row longer than that has one for itself.
    """
    widths = _rounded(lengths, length_multiple).sort(descending=True).values.tolist()
    return max(len(_groups(widths, max_tokens, packed)), 1)


def _micro_batch(
    rows: TokenBatch, index: Tensor, size: int, length_multiple: int | None = None, filling: int = 0
) -> MicroBatch:
    """``size`` rows, as wide as their longest where ``length_multiple`` is given."""
    places = torch.full((size,), filling)
    places[: len(index)] = index
    taken = rows.take(places, len(index))
    if length_multiple is not None:
        taken = taken.narrow(int(_rounded(taken.lengths, length_multiple).max()))
    return MicroBatch(taken, index)


def _packed(rows: TokenBatch, index: Tensor, filling: int, length_multiple: int) -> MicroBatch:
    batch = _micro_batch(rows, index, max(len(index), 1), length_multiple, filling)
    return replace(batch, rows=replace(batch.rows, packing=packing_of(batch.rows.lengths, length_multiple)))


def _shortest(rows: TokenBatch, index: Tensor) -> int:
    """The row that fills a micro-batch without rows: the shortest of those at ``index``, or of all."""
    return int(index[rows.lengths[index].argmin()] if len(index) else rows.lengths.argmin())


def _even_groups(widths: Sequence[int], count: int, max_tokens: int, packed: bool) -> list[list[int]]:
    """At most ``count`` groups with the least largest cost: a search by halves."""
    low, high = 0, max_tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_groups(widths, middle, packed)) <= count else (middle, high)
    return _groups(widths, high, packed)


def _groups(widths: Sequence[int], max_tokens: int, packed: bool) -> list[list[int]]:
    """Places in ``widths``, the longest first, so grouped that no group of several costs more than ``max_tokens``.

    Padded: each takes as many of the longest rows left as fit, which makes the fewest groups that can be. Packed: each
    row goes to the first group that has room for it (first-fit decreasing).
    """
    groups: list[list[int]] = []
    if not packed:
        at = 0
        while at < len(widths):
            end = min(at + max(max_tokens // widths[at], 1), len(widths))
            groups.append(list(range(at, end)))
            at = end
        return groups
    room: list[int] = []
    for place, width in enumerate(widths):
        to = next((number for number, left in enumerate(room) if left >= width), len(groups))
        if to == len(groups):
            groups.append([])
            room.append(max_tokens)
        groups[to].append(place)
        room[to] -= width
    return groups


def _rounded(lengths: Tensor, multiple: int) -> Tensor:
    return (lengths + multiple - 1) // multiple * multiple
