"""Divide sequences over context-parallel ranks in zigzag, so that causal attention costs every rank the same.

A sequence is cut into ``2 * cp`` equal pieces; rank ``r`` has piece ``r`` and piece ``2 * cp - 1 - r``, in this order,
as Megatron's rotary embeddings and Transformer Engine expect.
"""

from __future__ import annotations

import torch


def zigzag_positions(length: int, cp: int, rank: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the positions in a sequence that ``rank`` has, in its order: int64 ``[length / cp]``.

    Args:
        length: tokens of the sequence; a multiple of ``2 * cp``, or any number if cp is 1.
        cp: number of context-parallel ranks.
        rank: one of them.
        device: of the result.
    """
    if cp == 1:
        return torch.arange(length, device=device)
    piece = length // (2 * cp)
    within = torch.arange(piece, device=device)
    return torch.cat([within + rank * piece, within + (2 * cp - 1 - rank) * piece])


def zigzag_slice(tensor: torch.Tensor, cp: int, rank: int, dim: int = 1) -> torch.Tensor:
    """Return the part of ``tensor`` that ``rank`` has; dim ``dim`` of ``tensor`` is the whole sequence."""
    if cp == 1:
        return tensor
    return tensor.index_select(dim, zigzag_positions(tensor.size(dim), cp, rank, tensor.device))


def zigzag_join(parts: list[torch.Tensor], dim: int = 1) -> torch.Tensor:
    """Return the whole sequence from the parts of all cp ranks, in rank order: the inverse of ``zigzag_slice``."""
    cp = len(parts)
    gathered = torch.cat(parts, dim)
    positions = torch.cat([zigzag_positions(gathered.size(dim), cp, rank, gathered.device) for rank in range(cp)])
    return gathered.index_select(dim, positions.argsort())
