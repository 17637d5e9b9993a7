"""Prompts go from the shards of one layout to even shares of another, and what was made of them comes back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from parallel_state.agreement import all_gather_values
from workers.generate.rollout import Generated, Prompts

__all__ = ["RowExchange", "even_shares"]


class RowExchange:
    """Between a layout whose data-parallel ranks have prompts and return responses, and one that generates them.

    Both layouts are over all ranks of torch.distributed. Building one and all its methods are collective.
    """

    def __init__(self, asking: ProcessGroupCollection, generating: ProcessGroupCollection) -> None:
        self._asking = asking
        mine = _Place(
            asks=asking.dp.rank(),
            takes=_on_last_stage(asking),
            generates=generating.dp.rank(),
            gives=_on_last_stage(generating) and generating.tp.rank() == 0,
        )
        self._places = all_gather_values(mine)

    def gather(self, prompts: Prompts, pad_token_id: int) -> tuple[Prompts, list[int]]:
        """The prompts of all shards in their order, and how many each has."""
        shards = all_gather_values(prompts, self._asking.dp)
        width = max(shard.ids.size(1) for shard in shards)
        joined = Prompts(
            torch.cat([_widened(shard.ids, width, pad_token_id) for shard in shards]),
            torch.cat([_widened(shard.attention_mask, width, 0) for shard in shards]),
            torch.cat([shard.seeds for shard in shards]),
        )
        return joined, [len(shard.ids) for shard in shards]

    def hand_back(self, made: Generated, made_rows: Sequence[range], asked_rows: Sequence[range]) -> Generated | None:
        """The rows that this rank's shard asked for; None where the asking layout does not return any.

        Args:
            made: this rank's, rows ``made_rows`` of its place on the dp axis of the generating layout.
            made_rows, asked_rows: by place on the dp axis of either layout, the rows among all.
        """
        rank = dist.get_rank()
        own = made_rows[self._places[rank].generates]
        going = [self._between(rank, other, made_rows, asked_rows) for other in range(len(self._places))]
        coming = [self._between(other, rank, made_rows, asked_rows) for other in range(len(self._places))]
        order = sorted((other for other in range(len(coming)) if coming[other]), key=lambda other: coming[other].start)
        columns = []
        for column in made:
            outgoing = torch.cat([column[rows.start - own.start : rows.stop - own.start] for rows in going])
            incoming = column.new_empty(sum(map(len, coming)), *column.shape[1:])
            dist.all_to_all_single(incoming, outgoing, [len(rows) for rows in coming], [len(rows) for rows in going])
            parts = incoming.split([len(rows) for rows in coming])
            columns.append(torch.cat([parts[other] for other in order]) if order else incoming)
        return Generated(*columns) if self._places[rank].takes else None

    def _between(self, giver: int, taker: int, made_rows: Sequence[range], asked_rows: Sequence[range]) -> range:
        """The rows that one rank sends to another."""
        made, asked = made_rows[self._places[giver].generates], asked_rows[self._places[taker].asks]
        start, stop = max(made.start, asked.start), min(made.stop, asked.stop)
        if not (self._places[giver].gives and self._places[taker].takes) or start >= stop:
            return range(made.start, made.start)
        return range(start, stop)


def even_shares(rows: int, count: int) -> list[range]:
    """``rows`` consecutive rows in ``count`` shares, none longer than another by more than one."""
    return [range(index * rows // count, (index + 1) * rows // count) for index in range(count)]


def consecutive(lengths: Sequence[int]) -> list[range]:
    """Ranges of these lengths, one after another from 0."""
    return [range(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]


class _Place(NamedTuple):
    """A rank's places on the dp axes, whether it returns rows, and whether it has made rows to give."""

    asks: int
    takes: bool
    generates: int
    gives: bool


def _on_last_stage(pg: ProcessGroupCollection) -> bool:
    return pg.pp.rank() == pg.pp.size() - 1


def _widened(column: torch.Tensor, width: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(column, (width - column.size(1), 0), value=value)
