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
        multiple, packed = self.length_multiple, self.packed
        if not size.tokens:
            return equal_micro_batches(
                rows, index, most, size.rows, self.count_multiple, length_multiple=multiple, packed=packed
            )
        if not packed:
            multiple = width_multiple(multiple, self.device)
        least = least_count(
            rows.lengths[index], size.tokens, multiple, rows.tokens.size(1), packed=packed, together=rows.together
        )
        count = -(-max(self.gather(least)) // self.count_multiple) * self.count_multiple
        return token_micro_batches(rows, index, count, size.tokens, length_multiple=multiple, packed=packed)

    def on_device(self, model: Sequence[nn.Module], batches: Iterable[TokenBatch]) -> list[TokenBatch]:
        """Return micro-batches on the device, with this rank's targets located while their masks are on the CPU."""
        if self.share_prompts and not self.packed and computes_distinct_tokens(model):
            batches = [batch.with_distinct_tokens(self.length_multiple) for batch in batches]
        cp, ahead = self.pg.cp, getattr(get_model_config(model[-1]), "mtp_num_layers", None) or 0
        return [batch.for_rank(cp.size(), cp.rank(), ahead).to(self.device) for batch in batches]

    def gather(self, number: int) -> list[int]:
        """Return the ``number`` of every data-parallel rank, in the order of their shards (a collective)."""
        return [shard for (shard,) in gather_numbers([number], self.pg.dp, self.device)]


def width_multiple(length_multiple: int, device: torch.device) -> int:
    """Return the multiple of padded micro-batches' widths: on a GPU also of 128.

    cuDNN builds a plan for attention at every new width, which takes long. Multiples of 128 recur.

    Args:
        length_multiple: that the layout requires.
        device: of the model.
    """
    return length_multiple if device.type == "cpu" else math.lcm(length_multiple, _FEW_WIDTHS)


def equal_micro_batches(
    batch: TokenBatch,
    index: Tensor,
    most: int,
    micro_batch_size: int,
    multiple: int = 1,
    *,
    length_multiple: int = 1,
    packed: bool = False,
) -> list[MicroBatch]:
    """Divide the rows at ``index`` into micro-batches of equal size, the last ones filled up.

    Packed ones are not filled up; one without rows takes one short row as filling.

    Args:
        batch: the rows of this data-parallel rank.
        index: ``[n]`` int64, the rows to take.
        most: the largest number of rows of any data-parallel rank. Number and size of the micro-batches depend on it
            alone, so that all ranks agree.
        micro_batch_size: the most rows of a micro-batch.
        multiple: the number of micro-batches is a multiple of this (pp, under an interleaved schedule).
        length_multiple: the lengths of packed rows are rounded up to a multiple of this.
        packed: whether the rows of a micro-batch are one sequence.
    """
    units = -(-most // batch.together)
    count = max(-(-units // (micro_batch_size // batch.together)), 1)
    count = -(-count // multiple) * multiple
    size = max(-(-units // count), 1) * batch.together
    parts = [index[at * size : (at + 1) * size] for at in range(count)]
    if packed:
        return [_packed(batch, part, _shortest(batch, index), length_multiple) for part in parts]
    return [_micro_batch(batch, part, size) for part in parts]


def token_micro_batches(
    batch: TokenBatch, index: Tensor, count: int, max_tokens: int, *, length_multiple: int = 1, packed: bool = False
) -> list[MicroBatch]:
    """Divide the rows at ``index`` into ``count`` micro-batches, with the largest cost as small as the grouping allows.

    If there are fewer groups of rows than ``count``, each micro-batch without rows takes one short row as filling.

    Args:
        batch: the rows of this data-parallel rank.
        index: ``[n]`` int64, the rows to take.
        count: number of micro-batches, at least ``least_count`` of these rows.
        max_tokens: the most tokens of a micro-batch, unless it is a single row.
        length_multiple: lengths are rounded up to a multiple of this.
        packed: whether a micro-batch costs the sum of its lengths, or its rows times the longest.
    """
    longest = batch.tokens.size(1)
    widths = _rounded(batch.lengths[index], length_multiple, longest)
    costs, budget = _costs(widths, max_tokens, packed, batch.together)
    costs, by_cost = costs.sort(descending=True, stable=True)
    groups = _even_groups(costs.tolist(), count, budget, packed)
    groups += [[]] * (count - len(groups))
    units = index.view(-1, batch.together)
    parts = [units[by_cost[group]].flatten() for group in groups]
    shortest = _shortest(batch, index)
    if packed:
        return [_packed(batch, part, shortest, length_multiple) for part in parts]
    return [_micro_batch(batch, part, len(part) or batch.together, length_multiple, shortest) for part in parts]


def least_count(
    lengths: Tensor,
    max_tokens: int,
    length_multiple: int = 1,
    longest: int | None = None,
    *,
    packed: bool = False,
    together: int = 1,
) -> int:
    """Return how many micro-batches of at most ``max_tokens`` are needed for rows of these lengths, at least 1.

    A row that is longer than ``max_tokens`` has a micro-batch to itself.

    Args:
        lengths: ``[rows]`` int64.
        max_tokens: the most tokens of a micro-batch.
        length_multiple: lengths are rounded up to a multiple of this.
        longest: the width of the batch, which lengths are not rounded beyond; None for no limit.
        packed: whether a micro-batch costs the sum of its lengths, or its rows times the longest.
        together: how many consecutive rows stay together; they may cost more than ``max_tokens`` by themselves.
    """
    costs, budget = _costs(_rounded(lengths, length_multiple, longest), max_tokens, packed, together)
    return max(len(_groups(costs.sort(descending=True).values.tolist(), budget, packed)), 1)


def _costs(widths: Tensor, max_tokens: int, packed: bool, together: int) -> tuple[Tensor, int]:
    """What ``_groups`` takes for rows that stay together: the width of each unit of rows, and the budget."""
    units = widths.view(-1, together)
    return (units.sum(1), max_tokens) if packed else (units.amax(1), max_tokens // together)


def _micro_batch(
    batch: TokenBatch, index: Tensor, size: int, length_multiple: int | None = None, filling: int = 0
) -> MicroBatch:
    """``size`` rows, filled up with the row ``filling``; as wide as the longest if ``length_multiple`` is set."""
    rows = torch.full((size,), filling)
    rows[: len(index)] = index
    rows_of_micro_batch = batch.take(rows, len(index))
    if length_multiple is not None:
        rows_of_micro_batch = rows_of_micro_batch.narrow(
            int(_rounded(rows_of_micro_batch.lengths, length_multiple, batch.tokens.size(1)).max())
        )
    return MicroBatch(rows_of_micro_batch, index)


def _packed(batch: TokenBatch, index: Tensor, filling: int, length_multiple: int) -> MicroBatch:
    made = _micro_batch(batch, index, len(index) or batch.together, length_multiple, filling)
    return replace(made, batch=replace(made.batch, packing=packing_of(made.batch.lengths, length_multiple)))


def _shortest(batch: TokenBatch, index: Tensor) -> int:
    """The row that fills a micro-batch without rows: the shortest of the rows at ``index``, or of all."""
    return int(index[batch.lengths[index].argmin()] if len(index) else batch.lengths.argmin())


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


def _rounded(lengths: Tensor, multiple: int, longest: int | None) -> Tensor:
    rounded = (lengths + multiple - 1) // multiple * multiple
    return rounded if longest is None else rounded.clamp(max=longest)
