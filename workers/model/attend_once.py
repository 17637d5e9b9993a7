"""Attention by plain products: of one query per sequence, as in decoding, and of short sequences on a CPU."""

from __future__ import annotations

import torch

_SHORT = 32


def attend_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return the attention of one query per sequence ``[1, batch, heads * width]``: two small products.

    That is faster than a kernel for many queries. The heads that share keys are treated as queries, so that keys are
    read once for all of them.

    Args:
        query: ``[1, batch, heads, width]``.
        key: ``[seq, batch, groups, width]``.
        value: as ``key``; its heads may have another width.
        allowed: bool, broadcast to ``[batch, groups, heads / groups, seq]``; None allows all keys.
        scale: of the products of queries and keys.
    """
    _, batch, heads, width = query.shape
    shared = (query * scale).view(batch, key.size(2), heads // key.size(2), width)
    scores = torch.matmul(shared, key.permute(1, 2, 3, 0))
    if allowed is not None:
        scores.masked_fill_(~allowed, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value.permute(1, 2, 0, 3)).reshape(1, batch, -1)


def is_short(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Return whether plain products are faster than torch's kernel: for up to 32 tokens in float32 on a CPU."""
    length = query.size(0)
    return length == key.size(0) <= _SHORT and query.device.type == "cpu" and query.dtype == torch.float32


def attend_short(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the causal attention ``[seq, batch, heads * width]`` of sequences to themselves.

    Args:
        query: ``[seq, batch, heads, width]``.
        key: ``[seq, batch, groups, width]``.
        value: as ``key``.
        scale: of the products of queries and keys.
    """
    length, groups = len(query), key.size(2)
    shared = (query * scale).unflatten(2, (groups, -1)).permute(1, 2, 3, 0, 4)  # [batch, groups, heads, seq, width]
    scores = torch.matmul(shared, key.permute(1, 2, 3, 0)[:, :, None])
    scores += torch.full((length, length), -torch.inf, device=query.device).triu_(1)
    output = torch.matmul(scores.softmax(-1), value.permute(1, 2, 0, 3)[:, :, None])
    return output.permute(3, 0, 1, 2, 4).flatten(2)
