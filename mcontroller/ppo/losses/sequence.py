"""Policy losses of whole responses: GSPO and GMPO.

Each token carries the loss of its response; averaged with ``seq-mean-token-mean``, their default, each response counts
once, as in the papers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcontroller.ppo.losses.clipped import clipped_policy_loss
from mcontroller.ppo.losses.registry import PolicyLoss, register_policy_loss

__all__ = ["gmpo_policy_loss", "gspo_policy_loss"]


@register_policy_loss("gspo", whole_sequences=True, loss_agg_mode="seq-mean-token-mean", clip_low=3e-4, clip_high=4e-4)
def gspo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return the clipped surrogate of the length-normalized ratio of the response.

    The ratio is ``s = exp(mean over tokens of (log_probs - old_log_probs))``. Its gradient goes through each token's
    own log-probability: GSPO-token of Zheng et al., 2025, arXiv:2507.18071, which for one advantage per response has
    the gradient of GSPO. The default limits are the paper's: the ratio of a response is much closer to 1 than that of a
    token.

    Args: see ``clipped_policy_loss``; the mask has all tokens of the response.
    """
    mean = _mean_over_response(log_probs.detach() - old_log_probs, mask)[:, None]
    through_own_token = log_probs - log_probs.detach() + mean
    return clipped_policy_loss(
        through_own_token,
        torch.zeros_like(log_probs),
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


@register_policy_loss("gmpo", whole_sequences=True, loss_agg_mode="seq-mean-token-mean", clip_low=0.4, clip_high=0.4)
def gmpo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return ``-advantage`` times the geometric mean of the response's token ratios, each clipped.

    ``log ratio`` is clipped to ``[-clip_low, clip_high]`` where that lowers the objective, token by token (Zhao et al.,
    2025, arXiv:2507.20673); the default limits are the paper's, 0.4 on both sides. ``dual_clip`` is not used.

    Args: see ``clipped_policy_loss``; the mask has all tokens of the response.
    """
    log_ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0)
    bounded = log_ratio.clamp(-clip_low, clip_high)
    lower = torch.where(advantages >= 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    weight = torch.exp(_mean_over_response(lower, mask))[:, None]
    clipped = (lower != log_ratio).to(log_ratio.dtype)
    return PolicyLoss(-advantages * weight, torch.exp(log_ratio), clipped)


def _mean_over_response(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``values`` over the tokens of every response, ``[rows]``."""
    return torch.where(mask != 0, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)
