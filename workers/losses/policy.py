"""The policy losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_state.lazy import Lazy
from workers.losses.registry import PolicyLoss, register_policy_loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Lazy("torch")


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


@register_policy_loss("cispo", clip_low=1.0, unused=("clip_ratio_c",))
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


@register_policy_loss("gpg", unused=("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"))
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


@register_policy_loss(
    "gmpo",
    whole_sequences=True,
    loss_agg_mode="seq-mean-token-mean",
    clip_low=0.4,
    clip_high=0.4,
    unused=("clip_ratio_c",),
)
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
