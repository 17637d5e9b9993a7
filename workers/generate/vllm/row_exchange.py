"""Exchange of rows: prompts go to the ranks that call engines, and responses return to those that asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor


def exchange_rows(columns: Sequence[Tensor], held: Sequence[range], wanted: Sequence[range]) -> list[Tensor]:
    """Send rows of a batch from the ranks that hold them to those that want them (a collective of all ranks).

    Args:
        columns: of the rows that this rank holds, each ``[rows, ...]``, on the device of the collectives.
        held: by rank, the rows of the batch that it holds. A row is held by one rank.
        wanted: by rank, the rows that it wants.

    Returns:
        The columns of the rows that this rank wants, in their order.
    """
    rank = dist.get_rank()
    outgoing = [_overlap(held[rank], rows) for rows in wanted]
    incoming = [_overlap(rows, wanted[rank]) for rows in held]
    order = sorted((other for other in range(len(held)) if incoming[other]), key=lambda other: incoming[other].start)
    received = []
    for column in columns:
        sent = column.view(torch.int8) if column.dtype == torch.int16 else column  # there is no collective of int16
        parts = [sent[rows.start - held[rank].start : rows.stop - held[rank].start] for rows in outgoing]
        arrived = sent.new_empty(sum(map(len, incoming)), *sent.shape[1:])
        dist.all_to_all_single(arrived, torch.cat(parts), list(map(len, incoming)), list(map(len, outgoing)))
        by_rank = arrived.split(list(map(len, incoming)))
        ordered = torch.cat([by_rank[other] for other in order]) if order else arrived
        received.append(ordered.view(column.dtype))
    return received


def _overlap(one: range, other: range) -> range:
    """The rows of both; an empty range within ``one`` if there are none."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return range(start, stop) if start < stop else range(one.start, one.start)


def even_shares(rows: int, count: int) -> list[range]:
    """Divide ``rows`` consecutive rows into ``count`` shares whose lengths differ by at most one."""
    return [range(index * rows // count, (index + 1) * rows // count) for index in range(count)]


def consecutive(lengths: Sequence[int]) -> list[range]:
    """Return consecutive ranges of these lengths, from 0."""
    return [range(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]
