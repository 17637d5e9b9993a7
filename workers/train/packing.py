"""Rows of different lengths as one sequence without padding between them (Megatron's THD form).

Row after row, each padded only to the multiple that the cp axis and sequence parallelism need. Under context
parallelism every row is divided by itself, in zigzag (see
``workers.model.zigzag``), and a rank holds its part of every row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

__all__ = ["Packing", "packing_of"]


@dataclass(frozen=True)
class Packing:
    """Where each row of ``[rows, seq]`` stands in the sequence ``[1, total]``.

    Attributes:
        bounds: ``[rows + 1]`` int32, where rows begin, and last the end.
        total, longest: tokens of the sequence and of its longest row, with what rounds them up.
    """

    bounds: Tensor
    total: int
    longest: int

    @property
    def lengths(self) -> Tensor:
        """``[rows]`` int64: the tokens of each row, with what rounds them up."""
        return self.bounds.diff().long()

    def to(self, device: torch.device) -> Packing:
        """The same on ``device``."""
        return Packing(self.bounds.to(device), self.total, self.longest)

    def held(self, cp: int, rank: int) -> tuple[Tensor, Tensor]:
        """For every token that one rank of the cp axis holds, in its order: its row and column, ``[total / cp]``."""
        lengths, starts = self.lengths, self.bounds[:-1].long() // cp
        rows = torch.arange(len(lengths), device=lengths.device)
        row = rows.repeat_interleave(lengths // cp, output_size=self.total // cp)
        within = torch.arange(self.total // cp, device=lengths.device) - starts[row]
        if cp == 1:
            return row, within
        piece = lengths[row] // (2 * cp)
        return row, within + torch.where(within < piece, rank, 2 * cp - 2 - rank) * piece

    def params(self) -> PackedSeqParams:
        """What Megatron's attention and rotary positions take.

        What rounds a row up counts as its last tokens: under a causal mask no other token sees them, and attention
        kernels that know no gaps between sequences take it.
        """
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.bounds,
            cu_seqlens_kv=self.bounds,
            cu_seqlens_q_padded=self.bounds,
            cu_seqlens_kv_padded=self.bounds,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
        )


def packing_of(lengths: Tensor, multiple: int = 1) -> Packing:
    """Rows of these ``lengths`` ``[rows]``, on the CPU, each rounded up to a multiple of ``multiple``."""
    rounded = (lengths + multiple - 1) // multiple * multiple
    bounds = torch.cat((torch.zeros(1, dtype=torch.int32), rounded.cumsum(0).int()))
    return Packing(bounds, int(bounds[-1]), int(rounded.max()))
