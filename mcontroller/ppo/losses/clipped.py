"""Policy losses of single tokens: PPO's clipped surrogate, CISPO, and the plain policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from mcontroller.ppo.losses.registry import PolicyLoss, register_policy_loss

__all__ = ["cispo_policy_loss", "clipped_policy_loss", "gradient_policy_loss", "probability_ratio"]


def probability_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return ``exp(log_probs - old_log_probs)``, with the difference limited to +-20 so that it stays finite."""
    return torch.exp((log_probs - old_log_probs).clamp(-20.0, 20.0))


@register_policy_loss("ppo")
def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return PPO's clipped surrogate (Schulman et al., 2017, arXiv:1707.06347, equation 7), negated.

    With ``clip_high`` above ``clip_low`` it is DAPO's clip-higher (Yu et al., 2025, arXiv:2503.14476).

    Args:
        log_probs: ``[rows, response]``, natural logarithms under the policy in training.
        old_log_probs: ``[rows, response]``, the same under the policy that sampled.
        advantages: ``[rows, response]``.
        mask: ``[rows, response]``; not used, since the loss of a token depends on this token alone.
        clip_low: the ratio is clipped below ``1 - clip_low``.
        clip_high: the ratio is clipped above ``1 + clip_high``.
        dual_clip: for a negative advantage the loss is at most ``-dual_clip * advantage`` (Ye et al., 2020,
            arXiv:1912.09729, equation 5). None: no limit.
    """
    ratio = probability_ratio(log_probs, old_log_probs)
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


@register_policy_loss("cispo", clip_low=1.0)
def cispo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return ``-clip(ratio) * advantage * log_prob``, with no gradient through the clipped ratio.

    Every token keeps a gradient (MiniMax-M1, 2025, arXiv:2506.13585, equation 4). As in the paper, the ratio has no
    lower limit by default: ``clip_low=1``. ``dual_clip`` is not used.
    """
    ratio = probability_ratio(log_probs.detach(), old_log_probs)
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(-weight * advantages * log_probs, ratio, (weight != ratio).to(ratio.dtype))


@register_policy_loss("gpg")
def gradient_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return ``-advantage * log_prob`` (GPG: Chu et al., 2025, arXiv:2504.02546). The limits are not used."""
    ratio = probability_ratio(log_probs.detach(), old_log_probs)
    return PolicyLoss(-advantages * log_probs, ratio, torch.zeros_like(ratio))
