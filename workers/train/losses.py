"""The losses of PPO as pure functions of tensors, token by token.

None of them averages: a loss is summed over its mask and divided by the number of valid tokens of the whole global
mini-batch, which only the pipeline knows. ``masked_mean`` is for whoever holds the whole batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "PolicyLoss",
    "ValueLoss",
    "masked_mean",
    "masked_sum",
    "policy_loss",
    "value_loss",
]


class PolicyLoss(NamedTuple):
    """Per token, all ``[batch, seq]``: the loss, the probability ratio, and 1 where clipping decided."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


class ValueLoss(NamedTuple):
    """Per token, both ``[batch, seq]``: the loss, and 1 where clipping decided."""

    loss: Tensor
    clipped: Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of ``values`` where ``mask`` is not 0; what stands elsewhere, NaN included, does not count."""
    return torch.where(mask != 0, values * mask, torch.zeros_like(values)).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of ``values`` weighted by ``mask``; 0 for an empty mask."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), negated: smaller is better.

    Args:
        log_probs, old_log_probs, advantages: ``[batch, seq]``, natural logarithms.
        clip_low, clip_high: the ratio counts between ``1 - clip_low`` and ``1 + clip_high``.
        dual_clip: for a negative advantage the loss is at most ``-dual_clip * advantage`` (Ye et al. 2020, eq. 5).
    """
    ratio = torch.exp((log_probs - old_log_probs).clamp(-20.0, 20.0))
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, bounded)
    clipped = bounded > free
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        clipped = clipped | over
    return PolicyLoss(loss, ratio, clipped.to(loss.dtype))


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> ValueLoss:
    """Half the squared error to ``returns``, or the larger one of it and that of the value kept within ``clip`` of old.

    Args:
        values, old_values, returns: ``[batch, seq]``.
        clip: how far a value may move from its old one before it stops to pay; None leaves it free.
    """
    free = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * free, torch.zeros_like(free))
    change = values - old_values
    bounded = (old_values + change.clamp(-clip, clip) - returns).square()
    clipped = (change.abs() > clip) & (bounded > free)
    return ValueLoss(0.5 * torch.where(clipped, bounded, free), clipped.to(free.dtype))
