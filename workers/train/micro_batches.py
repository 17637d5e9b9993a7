"""Micro-batches: which rows go through the model together, by a number of rows or a budget of tokens.

A padded micro-batch costs its rows times the length of the longest, a packed one the sum of its rows' lengths. Under a
budget of tokens the largest cost is as small as the number of micro-batches allows. Padded rows are grouped with rows
of similar length, and each micro-batch is as wide as its own longest row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mcontroller.errors import DataError, before_changes
from workers.config.roles import MicroBatchSize
from workers.distinct_tokens import computes_distinct_tokens
from workers.train.batches import TokenBatch
from workers.train.mini_batches import gather_numbers
from workers.train.packing import packing_of

_FEW_WIDTHS = 128


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together, and their positions in the batch that they are from.

    Attributes:
        batch: the rows, and after them rows that only fill the micro-batch, with a mask of 0.
        index: row numbers in the whole batch (int64), without the filling.
    """

    batch: TokenBatch
    index: Tensor


@dataclass(frozen=True)
class MicroBatcher:
    """Divides the rows of a rank into micro-batches, and moves them to its device.

    Attributes:
        pg: the process groups of the layout.
        device: of the model.
        count_multiple: the number of micro-batches is a multiple of this (pp, under an interleaved schedule).
        length_multiple: so are the lengths of sequences of this, for cp, sequence parallelism and fp8.
        packed: whether the rows of a micro-batch go through the model as one sequence (see ``workers.train.packing``).
        share_prompts: whether equal prompts are computed once where possible (see ``workers.distinct_tokens``).
    """

    pg: ProcessGroupCollection
    device: torch.device
    count_multiple: int
    length_multiple: int
    packed: bool = False
    share_prompts: bool = False

    def divide(self, rows: TokenBatch, index: Tensor, most: int, size: MicroBatchSize) -> list[MicroBatch]:
        """Divide the rows at ``index`` into micro-batches, as many on every data-parallel rank (a collective).

        Those by rows have equal sizes, and are filled up unless they are packed. Those by tokens are as wide as their
        longest row; a row that is longer than the budget is alone. One without rows takes the shortest as filling.

        Args:
            rows: the rows of this rank.
            index: the rows to divide, int64.
            most: the largest number of rows that any data-parallel rank divides.
            size: rows or tokens of a micro-batch.

        Raises:
            DataError: more rows stay together (``meta_info["rows_together"]``) than a micro-batch has.
        """
        if not size.tokens and size.rows < rows.together:
            with before_changes():
                raise DataError(
                    f"micro-batches of {size.rows} rows, and meta_info['rows_together'] is {rows.together}: raise "
                    "ppo_micro_batch_size (and log_prob_micro_batch_size) to at least that",
                    rows_together=rows.together,
                )
        if size.tokens:
            parts, height = self._by_tokens(rows, index, size.tokens), None
        else:
            units = -(-most // rows.together)
            count = self._count(-(-units // (size.rows // rows.together)))
            height = max(-(-units // count), 1) * rows.together
            parts = [index[at * height : (at + 1) * height] for at in range(count)]
        filling = int(index[rows.lengths[index].argmin()] if len(index) else rows.lengths.argmin())
        return [self._micro_batch(rows, part, height, filling) for part in parts]

    def on_device(self, model: Sequence[nn.Module], batches: Iterable[TokenBatch]) -> list[TokenBatch]:
        """Return micro-batches on the device, with this rank's targets located while their masks are on the CPU."""
        if self.share_prompts and not self.packed and computes_distinct_tokens(model):
            batches = [batch.with_distinct_tokens(self.length_multiple) for batch in batches]
        cp, ahead = self.pg.cp, getattr(get_model_config(model[-1]), "mtp_num_layers", None) or 0
        return [batch.for_rank(cp.size(), cp.rank(), ahead).to(self.device) for batch in batches]

    def gather(self, number: int) -> list[int]:
        """Return the ``number`` of every data-parallel rank, in the order of their shards (a collective)."""
        return [shard for (shard,) in gather_numbers([number], self.pg.dp, self.device)]

    def _count(self, needed: int) -> int:
        return -(-max(needed, 1) // self.count_multiple) * self.count_multiple

    def _by_tokens(self, rows: TokenBatch, index: Tensor, max_tokens: int) -> list[Tensor]:
        """Return the rows of each micro-batch, with the largest cost as small as their number allows."""
        widths = _rounded(rows.lengths[index], self._multiple, rows.tokens.size(1)).view(-1, rows.together)
        costs, budget = (widths.sum(1), max_tokens) if self.packed else (widths.amax(1), max_tokens // rows.together)
        costs, by_cost = costs.sort(descending=True, stable=True)
        needed = len(_groups(costs.tolist(), budget, self.packed))
        count = self._count(max(self.gather(needed)))
        groups = _even_groups(costs.tolist(), count, budget, self.packed)
        groups += [[]] * (count - len(groups))
        units = index.view(-1, rows.together)
        return [units[by_cost[group]].flatten() for group in groups]

    @property
    def _multiple(self) -> int:
        """What lengths are rounded up to under a budget of tokens; on a GPU that of padded rows is also one of 128.

        cuDNN builds a plan for attention at every new width, which takes long. Multiples of 128 recur.
        """
        few = self.device.type != "cpu" and not self.packed
        return math.lcm(self.length_multiple, _FEW_WIDTHS) if few else self.length_multiple

    def _micro_batch(self, rows: TokenBatch, part: Tensor, height: int | None, filling: int) -> MicroBatch:
        """Return the rows at ``part``, padded ones filled up to ``height``, or as wide as the longest if it is None."""
        numbers = torch.full(((not self.packed and height) or len(part) or rows.together,), filling)
        numbers[: len(part)] = part
        batch = rows.take(numbers, len(part))
        if self.packed:
            batch = replace(batch, packing=packing_of(batch.lengths, self.length_multiple))
        elif height is None:
            batch = batch.narrow(int(_rounded(batch.lengths, self._multiple, rows.tokens.size(1)).max()))
        return MicroBatch(batch, part)


def _even_groups(widths: Sequence[int], count: int, max_tokens: int, packed: bool) -> list[list[int]]:
    """Return at most ``count`` groups with the largest cost as small as possible, found by bisection."""
    low, high = 0, max_tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_groups(widths, middle, packed)) <= count else (middle, high)
    return _groups(widths, high, packed)


def _groups(widths: Sequence[int], max_tokens: int, packed: bool) -> list[list[int]]:
    """Group positions in ``widths``, longest first, so that no group of several costs more than ``max_tokens``.

    Padded: each group takes as many of the longest remaining rows as fit: no grouping has fewer groups. Packed: each
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
    for position, width in enumerate(widths):
        to = next((number for number, left in enumerate(room) if left >= width), len(groups))
        if to == len(groups):
            groups.append([])
            room.append(max_tokens)
        groups[to].append(position)
        room[to] -= width
    return groups


def _rounded(lengths: Tensor, multiple: int, longest: int) -> Tensor:
    return ((lengths + multiple - 1) // multiple * multiple).clamp(max=longest)
