"""How context parallelism divides a sequence: in zigzag, so that causal attention costs every rank the same.

A sequence is cut into ``2 * cp`` equal pieces; rank ``r`` holds piece ``r`` and piece ``2 * cp - 1 - r``, in this
order, as Megatron's rotary embeddings and Transformer Engine take it.
"""

from __future__ import annotations

import torch


def zigzag_positions(length: int, cp: int, rank: int, device: torch.device | None = None) -> torch.Tensor:
    """The positions in a sequence of ``length`` tokens that ``rank`` holds, in its order: int64 [length / cp].

    ``length`` is a multiple of ``2 * cp``, or any length where cp is 1.
    """
    if cp == 1:
        return torch.arange(length, device=device)
    piece = length // (2 * cp)
    within = torch.arange(piece, device=device)
    return torch.cat([within + rank * piece, within + (2 * cp - 1 - rank) * piece])


def zigzag_slice(tensor: torch.Tensor, cp: int, rank: int, dim: int = 1) -> torch.Tensor:
    """What ``rank`` holds of ``tensor``, whose dim ``dim`` is the whole sequence."""
    if cp == 1:
        return tensor
    return tensor.index_select(dim, zigzag_positions(tensor.size(dim), cp, rank, tensor.device))


def zigzag_join(parts: list[torch.Tensor], dim: int = 1) -> torch.Tensor:
    """The whole sequence from what each rank of the cp axis holds, in rank order; undoes ``zigzag_slice``."""
    cp = len(parts)
    gathered = torch.cat(parts, dim)
    positions = torch.cat([zigzag_positions(gathered.size(dim), cp, rank, gathered.device) for rank in range(cp)])
    return gathered.index_select(dim, positions.argsort())
