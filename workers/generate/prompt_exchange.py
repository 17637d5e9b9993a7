"""Exchange of prompts and responses between two layouts of the same ranks.

Prompts go from the data-parallel shards of one layout to even shares of another, and responses go back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from parallel_state.agreement import all_gather_values
from workers.generate.rollout_protocol import Generated, Prompts


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
        own = shares[self._ranks[rank].generates_share]
        going = [self._between(rank, other, shares, shards) for other in range(len(self._ranks))]
        coming = [self._between(other, rank, shares, shards) for other in range(len(self._ranks))]
        order = sorted((other for other in range(len(coming)) if coming[other]), key=lambda other: coming[other].start)
        columns = []
        for kept in generated.columns():
            column = kept.view(torch.int8) if kept.dtype == torch.int16 else kept  # there is no collective of int16
            outgoing = torch.cat([column[rows.start - own.start : rows.stop - own.start] for rows in going])
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


class PromptExchange(ResponseExchange):
    """Connects a layout whose data-parallel ranks have prompts and return responses to one that generates them.

    Args:
        requesting: the layout with the prompts.
        generating: the layout that generates the responses.
    """

    def __init__(self, requesting: ProcessGroupCollection, generating: ProcessGroupCollection) -> None:
        self._requesting = requesting
        super().__init__(
            RankRole(
                requests_shard=requesting.dp.rank(),
                receives=_on_last_stage(requesting),
                generates_share=generating.dp.rank(),
                sends=_on_last_stage(generating) and generating.tp.rank() == 0,
            )
        )

    def gather(self, prompts: Prompts, pad_token_id: int) -> tuple[Prompts, list[int]]:
        """Return the prompts of all shards in order, and the number of prompts of each shard."""
        shards = all_gather_values(prompts, self._requesting.dp)
        width = max(shard.ids.size(1) for shard in shards)
        joined = Prompts(
            torch.cat([_widened(shard.ids, width, pad_token_id) for shard in shards]),
            torch.cat([_widened(shard.attention_mask, width, 0) for shard in shards]),
            torch.cat([shard.seeds for shard in shards]),
        )
        return joined, [len(shard.ids) for shard in shards]


def even_shares(rows: int, count: int) -> list[range]:
    """Divide ``rows`` consecutive rows into ``count`` shares whose lengths differ by at most one."""
    return [range(index * rows // count, (index + 1) * rows // count) for index in range(count)]


def consecutive(lengths: Sequence[int]) -> list[range]:
    """Return consecutive ranges of these lengths, from 0."""
    return [range(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]


def _on_last_stage(pg: ProcessGroupCollection) -> bool:
    return pg.pp.rank() == pg.pp.size() - 1


def _widened(column: torch.Tensor, width: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(column, (width - column.size(1), 0), value=value)
