"""Positions of rows and their targets in the sequences of a micro-batch.

Packed rows of different lengths are one sequence, without padding between them (Megatron's THD format). They follow
each other, each padded only to the multiple that the cp axis and sequence parallelism need. Under context parallelism
every row is split on its own, in zigzag (see ``workers.zigzag``), and a rank has its part of every row. The
output layer runs over the targets that count only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_state.patches.packed_rope import packed_positions
from workers.distinct_tokens import DistinctTokens, Spread, spread_of
from workers.model.packed_rows import PackedRows


@dataclass(frozen=True)
class Packing:
    """The position of each row of ``[rows, seq]`` in the packed sequence ``[1, total]``.

    Attributes:
        bounds: ``[rows + 1]`` int32, the start of every row, and last the end of the sequence.
        total: tokens of the sequence, with the padding of every row.
        longest: tokens of the longest row, with its padding.
        on_host: ``bounds`` as numbers.
    """

    bounds: Tensor
    total: int
    longest: int
    on_host: tuple[int, ...]

    @property
    def lengths(self) -> Tensor:
        """``[rows]`` int64: the tokens of each row, with its padding."""
        return self.bounds.diff().long()

    def tokens_of_rank(self, cp: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return the row and the column of every token that one rank of the cp axis has.

        Args:
            cp: size of the cp axis.
            rank: coordinate on the cp axis.

        Returns:
            Two tensors ``[total / cp]`` int64, in the order of the rank's tokens.
        """
        lengths, tokens = self.lengths, self.total // cp
        rows = torch.arange(len(lengths), device=lengths.device)
        row = rows.repeat_interleave(lengths // cp, output_size=tokens)
        return row, packed_positions(self.bounds, tokens, cp, rank)

    def params(self) -> PackedRows:
        """Return the parameters that Megatron's attention and rotary positions take.

        The padding of a row counts as its last tokens. Under a causal mask no other token attends to them, and
        attention kernels that do not support gaps between sequences accept it.
        """
        return PackedRows(
            qkv_format="thd",
            cu_seqlens_q=self.bounds,
            cu_seqlens_kv=self.bounds,
            cu_seqlens_q_padded=self.bounds,
            cu_seqlens_kv_padded=self.bounds,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
            bounds=self.on_host,
        )


def packing_of(lengths: Tensor, multiple: int = 1) -> Packing:
    """Return the packing of rows of these ``lengths``.

    Args:
        lengths: ``[rows]`` int64, on the CPU.
        multiple: each length is rounded up to a multiple of this.
    """
    rounded = (lengths + multiple - 1) // multiple * multiple
    bounds = torch.cat((torch.zeros(1, dtype=torch.int32), rounded.cumsum(0).int()))
    return Packing(bounds, int(bounds[-1]), int(rounded.max()), tuple(bounds.tolist()))


@dataclass(frozen=True)
class LocalTargets:
    """The targets with a mask other than 0 that one context-parallel rank predicts; at least one entry.

    Attributes:
        index: ``[n]`` int64, the position of each target in ``[rows * targets]``.
        predictors: ``[n]`` int64, the position of its predictor in this rank's hidden states, flattened from
            ``[seq, sequences]``.
        from_predictors: copies hidden states from their positions to the targets, if distinct tokens are computed: rows
            share the last token of their prompt then. None: all predictors differ.
        empty: whether the rank has no such target. The one entry only keeps every parameter in the graph then, as the
            gradient hooks of DistributedDataParallel require; its result must go through ``without_values``.
    """

    index: Tensor
    predictors: Tensor
    empty: bool = False
    from_predictors: Spread | None = None

    def select(self, hidden: Tensor) -> Tensor:
        """Return ``[n, width]``, the hidden states that predict these targets.

        Args:
            hidden: ``[seq * sequences, width]``.
        """
        if self.from_predictors is None:
            return hidden.index_select(0, self.predictors)
        return self.from_predictors(hidden)

    def scatter(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Return ``[..., rows, targets]`` with these values, and 0 for all other targets.

        Args:
            values: ``[..., n]``, one for each of these targets.
            shape: ``(rows, targets)``.
        """
        if self.empty:
            values = without_values(values)
        everything = values.new_zeros(*values.shape[:-1], shape.numel())
        everything = everything.index_copy(-1, self.index, values)
        return everything.unflatten(-1, shape)


def without_values(values: Tensor) -> Tensor:
    """Return zeros that give gradients of 0 to ``values``, also for gradients of NaN, which a product with 0 keeps."""
    return values.masked_fill(torch.ones_like(values, dtype=torch.bool), 0.0)


def locate_local_targets(
    mask: Tensor,
    predictors: Tensor,
    width: int,
    packing: Packing | None,
    *,
    cp: int,
    rank: int,
    distinct: DistinctTokens | None = None,
) -> LocalTargets:
    """Return the targets that count and that one context-parallel rank predicts.

    Call this while the tensors are on the CPU: the number of targets depends on the values of the mask, for which the
    host would have to wait for a GPU.

    Args:
        mask: ``[rows, targets]``, 0 if a target does not count.
        predictors: ``[rows, targets]`` int64, the column of the row that predicts each target.
        width: columns of the padded rows.
        packing: the position of each row in one sequence, or None if rows are padded.
        cp: size of the cp axis.
        rank: coordinate on the cp axis.
        distinct: the tokens of the rows that are computed, without context parallelism; None: all.
    """
    index = mask.flatten().nonzero().flatten()
    row, column = index // mask.size(1), predictors.flatten()[index]
    if distinct is not None and len(index):
        position = distinct.of_row[row, column]
        return LocalTargets(index, position, from_predictors=spread_of(position, distinct.total))
    widths: Tensor = torch.full_like(row, width) if packing is None else packing.lengths[row]
    piece = widths // (2 * cp)
    if cp > 1:
        number, offset = column // piece, column % piece
        second = number == 2 * cp - 1 - rank
        local = (number == rank) | second
        index, row, column = index[local], row[local], (offset + piece * second)[local]
    start_of_row, rows = (row, len(mask)) if packing is None else (packing.bounds.long()[row] // cp, 1)
    position = column * rows + start_of_row
    if len(index) == 0:
        return LocalTargets(index.new_zeros(1), index.new_zeros(1), empty=True)
    return LocalTargets(index, position)
