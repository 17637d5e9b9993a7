"""Generalized advantage estimation, with a critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcontroller.config.fields import strict_fields
from mcontroller.data.protocol import DataProto
from mcontroller.ppo.data import columns
from mcontroller.ppo.estimators.registry import register_advantage_estimator
from mcontroller.ppo.estimators.token_sums import discounted_sums, inside, packed_left, row_blocks, unpacked, whiten

__all__ = ["GAEOptions", "compute_gae", "gae"]


@strict_fields
@dataclass(frozen=True, slots=True)
class GAEOptions:
    """Options of ``adv_estimator=gae``."""

    normalize: bool = True
    """Scale advantages to mean 0 and variance 1 over all response tokens of the batch."""


def compute_gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of generalized advantage estimation, ``[rows, response]``.

    ``A_t = sum_l (gamma * lam)^l * (r_{t+l} + gamma * V_{t+l+1} - V_{t+l})`` over the tokens of the response, with a
    value of 0 after the last one; ``returns = A + V`` (Schulman et al., 2015, arXiv:1506.02438, equation 16). Tokens
    with a mask of 0, at the end or in between (a tool's output), are skipped: their rewards and values do not count.

    Args:
        token_level_rewards: ``[rows, response]``.
        values: ``[rows, response]``, of the critic.
        response_mask: ``[rows, response]``, 1 for the tokens of the response.
        gamma: discount factor per token.
        lam: weight of later errors; 0 is one-step, 1 is Monte Carlo.
    """
    advantages, returns = torch.empty_like(values), torch.empty_like(values)
    for rows in row_blocks(values.shape):
        mask = response_mask[rows].bool()
        errors, known = packed_left(token_level_rewards[rows].to(values.dtype), mask), packed_left(values[rows], mask)
        errors.sub_(known)[:, :-1].add_(known[:, 1:], alpha=gamma)
        advantages[rows] = unpacked(discounted_sums(errors, gamma * lam), mask)
        torch.add(advantages[rows], inside(values[rows], mask), out=returns[rows])
    return advantages, returns


@register_advantage_estimator("gae", needs_critic=True, options=GAEOptions)
def gae(data: DataProto, *, gamma: float, lam: float, options: GAEOptions) -> tuple[Tensor, Tensor]:
    """Return ``compute_gae`` with the critic's ``values``."""
    rewards, values, mask = columns(data, "token_level_rewards", "values", "response_mask")
    advantages, returns = compute_gae(rewards, values, mask, gamma, lam)
    return (whiten(advantages, mask) if options.normalize else advantages), returns
