"""Packing: rows of different lengths as one sequence, without padding between them (Megatron's THD format).

Rows follow each other, each padded only to the multiple that the cp axis and sequence parallelism need. Under context
parallelism every row is split on its own, in zigzag (see ``workers.model.zigzag``), and a rank has its part of every
row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.model.packed_rows import PackedRows

__all__ = ["Packing", "packing_of"]


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

    def to(self, device: torch.device) -> Packing:
        """Return the packing with its bounds on ``device``."""
        return replace(self, bounds=self.bounds.to(device))

    def tokens_of_rank(self, cp: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return the row and the column of every token that one rank of the cp axis has.

        Args:
            cp: size of the cp axis.
            rank: coordinate on the cp axis.

        Returns:
            Two tensors ``[total / cp]`` int64, in the order of the rank's tokens.
        """
        lengths, starts = self.lengths, self.bounds[:-1].long() // cp
        rows = torch.arange(len(lengths), device=lengths.device)
        row = rows.repeat_interleave(lengths // cp, output_size=self.total // cp)
        within = torch.arange(self.total // cp, device=lengths.device) - starts[row]
        if cp == 1:
            return row, within
        piece = lengths[row] // (2 * cp)
        return row, within + torch.where(within < piece, rank, 2 * cp - 2 - rank) * piece

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
