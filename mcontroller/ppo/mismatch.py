"""The mismatch between the policy that generated and the policy that trains, and its correction.

An inference engine, another precision or a stale policy computes other log-probabilities for the same tokens.
``mismatch_metrics`` reports the difference; importance weights correct it in the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcontroller.data.protocol import DataProto
from mcontroller.ppo.config import ImportanceConfig
from mcontroller.ppo.data import columns

__all__ = ["importance_weights", "mismatch_metrics"]


def importance_weights(data: DataProto, config: ImportanceConfig) -> tuple[Tensor, dict[str, float]]:
    """Return the weight of every token in the policy loss, float32 ``[rows, response]``, and metrics.

    Truncated importance sampling (Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"), and its masked variant (Liu et al., 2025, "When speed kills stability").

    Args:
        data: ``old_log_probs``, ``rollout_log_probs`` and ``response_mask`` ``[rows, response]``.
        config: level, mode and limits.

    Raises:
        DataError: a column is missing.
    """
    policy, rollout, mask = columns(data, "old_log_probs", "rollout_log_probs", "response_mask")
    kept = mask.bool()
    log_ratio = torch.where(kept, policy - rollout, 0.0)
    if config.level == "sequence":
        log_ratio = torch.where(kept, log_ratio.sum(1, keepdim=True), 0.0)
    ratio = torch.exp(log_ratio.clamp(-20.0, 20.0))
    outside = ratio > config.threshold
    if config.mode == "truncate":
        weights = ratio.clamp(max=config.threshold)
    else:
        outside |= ratio < config.least
        weights = torch.where(outside, 0.0, ratio)
    tokens = kept.sum().clamp(min=1)
    metrics = {
        "training/importance_weight_mean": float((weights * kept).sum() / tokens),
        "training/importance_limited_fraction": float((outside & kept).sum() / tokens),
    }
    return weights * kept, metrics


def mismatch_metrics(data: DataProto) -> dict[str, float]:
    """Return the differences of the probabilities of the sampled tokens between rollout and policy.

    ``training/rollout_probs_diff_mean``, ``_max`` and ``_std`` are of ``|p_rollout - p_policy|``;
    ``training/rollout_kl`` is the mean of ``log p_rollout - log p_policy``, an estimate of KL(rollout || policy) in
    nats per token.

    Args:
        data: ``old_log_probs``, ``rollout_log_probs`` and ``response_mask`` ``[rows, response]``; without
            ``rollout_log_probs`` the result is empty.

    Raises:
        DataError: another column is missing.
    """
    if "rollout_log_probs" not in data.tensor_names:
        return {}
    policy, rollout, mask = columns(data, "old_log_probs", "rollout_log_probs", "response_mask")
    policy, rollout = policy[mask.bool()].double(), rollout[mask.bool()].double()
    if not policy.numel():
        return {}
    kl = float((rollout - policy).mean())
    difference = rollout.exp_().sub_(policy.exp_()).abs_()  # in place: the controller has all tokens of a batch
    return {
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_std": float(difference.std(correction=0)),
        "training/rollout_kl": kl,
    }
