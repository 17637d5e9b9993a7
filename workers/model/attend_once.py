"""Attention of one query per sequence, as in decoding, over keys of which some may be masked."""

from __future__ import annotations

import torch

__all__ = ["attend_once"]


def attend_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return the attention of one query per sequence ``[1, batch, heads * width]``: two small products.

    That is faster than a kernel for many queries. The heads that share keys are treated as queries, so that keys are
    read once for all of them.

    Args:
        query: ``[1, batch, heads, width]``.
        key: ``[seq, batch, groups, width]``.
        value: as ``key``.
        allowed: bool, broadcast to ``[batch, groups, heads / groups, seq]``; None allows all keys.
        scale: of the products of queries and keys.
    """
    _, batch, heads, width = query.shape
    shared = (query * scale).view(batch, key.size(2), heads // key.size(2), width)
    scores = torch.matmul(shared, key.permute(1, 2, 3, 0))
    if allowed is not None:
        scores.masked_fill_(~allowed, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value.permute(1, 2, 0, 3)).reshape(1, batch, heads * width)
