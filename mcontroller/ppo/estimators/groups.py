"""Estimators that compare a response with the other responses to the same prompt (the same ``uid``).

A group of equal scores, or of one response, has an advantage of exactly 0 in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcontroller.config.checks import check_one_of
from mcontroller.config.fields import strict_fields
from mcontroller.data.protocol import DataProto
from mcontroller.ppo.estimators.outcomes import groups_of, outcomes
from mcontroller.ppo.estimators.registry import KLInReward, register_advantage_estimator

__all__ = ["GPGOptions", "GRPOOptions", "gpg", "grpo", "opo", "rloo"]

SCALES = ("group", "batch", "none")
EPSILON = 1e-6
"""Added to a standard deviation before a division."""


@strict_fields
@dataclass(frozen=True, slots=True)
class GRPOOptions:
    """Options of ``adv_estimator=grpo``."""

    scale: str = "group"
    """Standard deviation that divides the differences of scores: group, batch, or none (Dr.GRPO)."""
    ddof: int = 0
    """Subtracted from the number of scores in the variance: 0, or 1 as TRL and verl do."""

    def __post_init__(self) -> None:
        check_one_of("algorithm.grpo.scale", self.scale, SCALES)
        check_one_of("algorithm.grpo.ddof", str(self.ddof), ("0", "1"))


@strict_fields
@dataclass(frozen=True, slots=True)
class GPGOptions:
    """Options of ``adv_estimator=gpg``."""

    scale: str = "none"
    """Standard deviation that divides the differences of scores: group, or none."""

    def __post_init__(self) -> None:
        check_one_of("algorithm.gpg.scale", self.scale, ("group", "none"))


@register_advantage_estimator("grpo", needs_group=True, kl_in_reward=KLInReward.REJECTED, options=GRPOOptions)
def grpo(data: DataProto, *, gamma: float, lam: float, options: GRPOOptions) -> tuple[Tensor, Tensor]:
    """Return ``(R - mean) / std`` on each token, over the responses to the same prompt.

    Shao et al., 2024, arXiv:2402.03300, section 4.1.2; without the division it is Dr.GRPO (Liu et al., 2025,
    arXiv:2503.20783, section 3.2).
    """
    result, groups = outcomes(data, gamma), groups_of(data)
    centered = result.scores - groups.mean(result.scores)
    if options.scale == "none":
        return result.on_tokens(centered)
    if options.scale == "group":
        sizes = groups.sizes
        std = groups.std(result.scores) * (sizes / (sizes - options.ddof).clamp(min=1)).sqrt()
    else:
        std = result.scores.std(correction=min(options.ddof, len(data) - 1))
    return result.on_tokens(centered / (std + EPSILON))


@register_advantage_estimator("rloo", needs_group=True)
def rloo(data: DataProto, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return the score minus the mean of the other responses to the same prompt, on each token.

    Ahmadian et al., 2024, arXiv:2402.14740, equation 8.
    """
    result, groups = outcomes(data, gamma), groups_of(data)
    others = groups.sizes / (groups.sizes - 1).clamp(min=1)
    return result.on_tokens((result.scores - groups.mean(result.scores)) * others)


@register_advantage_estimator("opo", needs_group=True)
def opo(data: DataProto, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return the score minus the mean of the group weighted by the length of the responses, on each token.

    The weights make the variance of the gradient least if the squared norms of the responses' gradients are
    proportional to their lengths (Hao et al., 2025, arXiv:2505.23585).
    """
    result, groups = outcomes(data, gamma), groups_of(data)
    lengths = result.mask.sum(1).double()
    baseline = groups.sums(lengths * result.scores) / groups.sums(lengths).clamp(min=1)
    baseline = torch.where(groups.equal(result.scores), result.scores, baseline)
    return result.on_tokens(result.scores - baseline)


@register_advantage_estimator("gpg", needs_group=True, kl_in_reward=KLInReward.REJECTED, options=GPGOptions)
def gpg(data: DataProto, *, gamma: float, lam: float, options: GPGOptions) -> tuple[Tensor, Tensor]:
    """Return ``alpha * (R - mean)`` on each token, over the responses to the same prompt.

    ``alpha`` is the number of responses of the batch divided by those in groups of unequal scores, which alone have a
    gradient (Chu et al., 2025, arXiv:2504.02546).
    """
    result, groups = outcomes(data, gamma), groups_of(data)
    signal = (~groups.equal(result.scores)).sum().clamp(min=1)
    advantages = (result.scores - groups.mean(result.scores)) * len(data) / signal
    if options.scale == "group":
        advantages = advantages / (groups.std(result.scores) + EPSILON)
    return result.on_tokens(advantages)
