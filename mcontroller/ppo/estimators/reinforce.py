"""Estimators of the REINFORCE family: returns, with no baseline or with one that needs no critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcontroller.config.fields import strict_fields
from mcontroller.data.protocol import DataProto
from mcontroller.ppo.data import columns
from mcontroller.ppo.estimators.groups import EPSILON
from mcontroller.ppo.estimators.outcomes import groups_of, outcomes
from mcontroller.ppo.estimators.registry import KLInReward, register_advantage_estimator
from mcontroller.ppo.estimators.token_sums import discounted_sums, packed_left, row_blocks, unpacked, whiten

__all__ = [
    "ReinforcePlusPlusBaselineOptions",
    "ReinforcePlusPlusOptions",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
]


@strict_fields
@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusOptions:
    """Options of ``adv_estimator=reinforce_plus_plus``."""

    normalize: bool = True
    """Scale advantages to mean 0 and variance 1 over all response tokens of the batch."""


@strict_fields
@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusBaselineOptions:
    """Options of ``adv_estimator=reinforce_plus_plus_baseline``."""

    normalize: bool = True
    """Divide advantages by their standard deviation over all responses of the batch."""


@register_advantage_estimator("reinforce_plus_plus", kl_in_reward=KLInReward.DEFAULT, options=ReinforcePlusPlusOptions)
def reinforce_plus_plus(
    data: DataProto, *, gamma: float, lam: float, options: ReinforcePlusPlusOptions
) -> tuple[Tensor, Tensor]:
    """Return ``sum_k gamma^k * r_{t+k}``, normalized over the tokens of the batch.

    Hu, 2025, arXiv:2501.03262; the rewards contain the KL penalty.
    """
    rewards, mask = columns(data, "token_level_rewards", "response_mask")
    returns = _returns(rewards, mask, gamma)
    advantages = whiten(returns, mask) if options.normalize else returns
    return advantages.float(), returns.float()


@register_advantage_estimator(
    "reinforce_plus_plus_baseline", needs_group=True, options=ReinforcePlusPlusBaselineOptions
)
def reinforce_plus_plus_baseline(
    data: DataProto, *, gamma: float, lam: float, options: ReinforcePlusPlusBaselineOptions
) -> tuple[Tensor, Tensor]:
    """Return ``(R - mean of the group) / std of the batch`` on each token.

    The mean of ``R - mean of the group`` over the batch is 0, so that normalization over responses only divides: a
    group of equal scores keeps an advantage of exactly 0 (Hu, 2025, arXiv:2501.03262).
    """
    result, groups = outcomes(data, gamma), groups_of(data)
    advantages = result.scores - groups.mean(result.scores)
    if options.normalize:
        advantages = advantages / (advantages.square().mean().sqrt() + EPSILON)
    return result.on_tokens(advantages)


@register_advantage_estimator("remax", needs_greedy=True)
def remax(data: DataProto, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return ``sum_k gamma^k * r_{t+k}`` minus the score of the greedy response to the same prompt.

    Li et al., 2023, arXiv:2310.10505. ``greedy_scores``, float32 ``[rows]``, has the greedy scores.
    """
    rewards, greedy, mask = columns(data, "token_level_rewards", "greedy_scores", "response_mask")
    returns = _returns(rewards, mask, gamma)
    advantages = torch.where(mask.bool(), returns - greedy[:, None], 0.0)
    return advantages.float(), returns.float()


def _returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return ``sum_k gamma^k * r_{t+k}`` over the tokens of the response, in the shape and dtype of ``rewards``."""
    returns = torch.empty_like(rewards)
    for rows in row_blocks(rewards.shape):
        kept = mask[rows].bool()
        returns[rows] = unpacked(discounted_sums(packed_left(rewards[rows], kept), gamma), kept)
    return returns
