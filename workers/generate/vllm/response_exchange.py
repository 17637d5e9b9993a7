"""Exchange of responses: from the ranks with the engines to the ranks that return them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from parallel_state.agreement import all_gather_values
from workers.generate.rollout_protocol import Generated


class RankRole(NamedTuple):
    """The part of one rank in the exchange."""

    requests_shard: int
    """Its dp rank in the requesting layout."""
    receives: bool
    """Whether it returns responses there."""
    generates_share: int
    """The share of the responses that it generates."""
    sends: bool
    """Whether it sends the responses of its share; of several ranks with the same share, one does."""


class ResponseExchange:
    """Sends responses from the ranks that generated shares of them to the ranks that return them.

    The ranks are all ranks of torch.distributed. The constructor and the method are collectives.

    Args:
        mine: the part of this rank.
    """

    def __init__(self, mine: RankRole) -> None:
        self._ranks = all_gather_values(mine)

    def return_responses(
        self, generated: Generated, shares: Sequence[range], shards: Sequence[range]
    ) -> Generated | None:
        """Send the responses back to the ranks that requested them.

        Args:
            generated: the responses of this rank's share.
            shares: by share, its rows among all responses.
            shards: by dp rank of the requesting layout, its rows among all responses.

        Returns:
            The responses of this rank's shard; None on ranks that do not return results in the requesting layout.
        """
        rank = dist.get_rank()
        share = shares[self._ranks[rank].generates_share]
        going = [self._between(rank, other, shares, shards) for other in range(len(self._ranks))]
        coming = [self._between(other, rank, shares, shards) for other in range(len(self._ranks))]
        order = sorted((other for other in range(len(coming)) if coming[other]), key=lambda other: coming[other].start)
        columns = []
        for kept in generated.columns():
            column = kept.view(torch.int8) if kept.dtype == torch.int16 else kept  # there is no collective of int16
            outgoing = torch.cat([column[rows.start - share.start : rows.stop - share.start] for rows in going])
            incoming = column.new_empty(sum(map(len, coming)), *column.shape[1:])
            dist.all_to_all_single(incoming, outgoing, [len(rows) for rows in coming], [len(rows) for rows in going])
            parts = incoming.split([len(rows) for rows in coming])
            columns.append((torch.cat([parts[other] for other in order]) if order else incoming).view(kept.dtype))
        return Generated.of_columns(columns) if self._ranks[rank].receives else None

    def _between(self, sender: int, receiver: int, shares: Sequence[range], shards: Sequence[range]) -> range:
        """The rows that one rank sends to another."""
        share = shares[self._ranks[sender].generates_share]
        shard = shards[self._ranks[receiver].requests_shard]
        start, stop = max(share.start, shard.start), min(share.stop, shard.stop)
        if not (self._ranks[sender].sends and self._ranks[receiver].receives) or start >= stop:
            return range(share.start, share.start)
        return range(start, stop)


def even_shares(rows: int, count: int) -> list[range]:
    """Divide ``rows`` consecutive rows into ``count`` shares whose lengths differ by at most one."""
    return [range(index * rows // count, (index + 1) * rows // count) for index in range(count)]


def consecutive(lengths: Sequence[int]) -> list[range]:
    """Return consecutive ranges of these lengths, from 0."""
    return [range(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]
