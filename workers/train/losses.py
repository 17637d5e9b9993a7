"""Sums over tokens, and the value loss, as pure functions of tensors.

No loss is averaged here: the pipeline sums it over the mask and divides it by the valid tokens of the whole global
mini-batch. Policy losses are in ``mcontroller.ppo.losses``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workers.train.batches import TokenBatch
from workers.train.metrics import TOKENS

__all__ = ["ValueLoss", "masked_mean", "masked_sum", "sft_loss", "value_loss"]


class ValueLoss(NamedTuple):
    """The value loss of every token; both tensors are float ``[rows, response]``.

    Attributes:
        loss: the loss, to be minimized.
        clipped: 1 for tokens whose loss is determined by clipping, otherwise 0.
    """

    loss: Tensor
    clipped: Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of ``values * mask``; entries with a mask of 0 do not count, even if they are NaN."""
    return torch.where(mask != 0, values * mask, torch.zeros_like(values)).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``values`` weighted by ``mask``; 0 for an empty mask."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def sft_loss(rows: TokenBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the cross entropy of the targets: see ``ModelWorker.loss``."""
    log_probs, entropy = output
    mask = rows.mask
    total, count = masked_sum(-log_probs, mask), mask.sum()
    return total, count, {"loss": total.detach(), "entropy": masked_sum(entropy.detach(), mask), TOKENS: count}


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> ValueLoss:
    """Return half the squared error of the values, the larger one of the value and of the clipped value.

    Args:
        values: ``[rows, response]``, of the critic in training.
        old_values: ``[rows, response]``, before the update.
        returns: ``[rows, response]``, the targets.
        clip: a value is clipped to this distance from its old value. None: no clipping.
    """
    free = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * free, torch.zeros_like(free))
    change = values - old_values
    bounded = (old_values + change.clamp(-clip, clip) - returns).square()
    clipped = (change.abs() > clip) & (bounded > free)
    return ValueLoss(0.5 * torch.where(clipped, bounded, free), clipped.to(free.dtype))
