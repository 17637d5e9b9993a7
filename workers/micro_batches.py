"""Which rows of a mini-batch go through the model together: so many rows at a time, or so many tokens.

A micro-batch costs rows times the length of its longest row, padding included. Under a budget of tokens rows of
similar length go together, each micro-batch is as wide as its own longest row, and the largest cost is as small as the
number of micro-batches allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workers.batches import Rows

__all__ = ["MicroBatch", "MicroBatchSize", "equal_micro_batches", "least_count", "token_micro_batches"]


class MicroBatchSize(NamedTuple):
    """The most that one data-parallel rank takes at a time: so many ``rows``, or so many ``tokens`` where not 0."""

    rows: int
    tokens: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together, and where they are from.

    Attributes:
        index: their places among all rows, without the filling at the end of ``rows``.
    """

    rows: Rows
    index: Tensor


def equal_micro_batches(
    rows: Rows, index: Tensor, most: int, micro_batch_size: int, multiple: int = 1
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


def token_micro_batches(
    rows: Rows, index: Tensor, count: int, max_tokens: int, *, length_multiple: int = 1
) -> list[MicroBatch]:
    """The rows at ``index`` in ``count`` micro-batches of rows times length as equal as sorting by length makes them.

    Micro-batches beyond the number of rows are a row of filling.

    Args:
        count: at least ``least_count`` of these rows.
        max_tokens: what no micro-batch is more than, unless it is a single row.
        length_multiple: lengths are rounded up to a multiple of this.
    """
    widths, by_length = _rounded(rows.lengths[index], length_multiple).sort(descending=True, stable=True)
    sizes = _even_sizes(widths.tolist(), count, max_tokens)
    sizes += [0] * (count - len(sizes))
    parts = index[by_length].split(sizes)
    shortest = index[by_length[-1]] if len(index) else rows.lengths.argmin()
    return [_micro_batch(rows, part, max(len(part), 1), length_multiple, int(shortest)) for part in parts]


def least_count(lengths: Tensor, max_tokens: int, length_multiple: int = 1) -> int:
    """How many micro-batches of at most ``max_tokens``, rows times length, rows of these lengths need; at least 1.

    A row longer than that has one for itself.
    """
    widths = _rounded(lengths, length_multiple).sort(descending=True).values.tolist()
    return max(len(_sizes(widths, max_tokens)), 1)


def _micro_batch(
    rows: Rows, index: Tensor, size: int, length_multiple: int | None = None, filling: int = 0
) -> MicroBatch:
    """``size`` rows, as wide as their longest where ``length_multiple`` is given."""
    places = torch.full((size,), filling)
    places[: len(index)] = index
    taken = rows.take(places, len(index))
    if length_multiple is not None:
        taken = taken.narrow(int(_rounded(taken.lengths, length_multiple).max()))
    return MicroBatch(taken, index)


def _even_sizes(widths: Sequence[int], count: int, max_tokens: int) -> list[int]:
    """Rows of each micro-batch, at most ``count`` of them, with the least largest cost: a search by halves."""
    low, high = 0, max(max_tokens, *widths, 0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_sizes(widths, middle)) <= count else (middle, high)
    return _sizes(widths, high)


def _sizes(widths: Sequence[int], max_tokens: int) -> list[int]:
    """Rows of each micro-batch when each takes as many of the longest rows left as fit: the fewest that can be."""
    sizes, at = [], 0
    while at < len(widths):
        sizes.append(min(max(max_tokens // widths[at], 1), len(widths) - at))
        at += sizes[-1]
    return sizes


def _rounded(lengths: Tensor, multiple: int) -> Tensor:
    return (lengths + multiple - 1) // multiple * multiple
