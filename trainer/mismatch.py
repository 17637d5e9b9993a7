"""The mismatch between the policy that generated and the policy that trains, and its correction.

An inference engine, another precision or a stale policy computes other log-probabilities for the same tokens.
``mismatch_metrics`` reports the difference; importance weights correct it in the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcontroller.data.batch import DataProto
from trainer.columns import columns
from trainer.config import ImportanceConfig

TOKEN_VERSIONS = "token_versions"
"""Column of the version of the policy that sampled each token, int64 ``[rows, response]``; -1 for others."""


MISMATCH_METRICS = frozenset(
    f"training/{name}"
    for name in ("rollout_probs_diff_mean", "rollout_probs_diff_max", "rollout_probs_diff_std", "rollout_kl")
)
"""The names of ``mismatch_metrics``; an update without old log-probabilities reports some of them itself."""


def importance_weights(data: DataProto, config: ImportanceConfig) -> tuple[Tensor, dict[str, float]]:
    """Return the weight of every token in the policy loss, float32 ``[rows, response]``, and metrics.

    With ``mu`` the rollout's probability of a token, of the version of the policy that sampled it, ``pi`` that of the
    policy before the update, and ``T`` the tokens of a response that the policy sampled, the ratio of token ``t`` is::

        token:      r_t = pi_t / mu_t
        sequence:   r_t = prod_{s in T} pi_s / mu_s
        geometric:  r_t = (prod_{s in T} pi_s / mu_s)^(1 / |T|)

    and its weight::

        truncate:   w_t = min(r_t, threshold)
        mask:       w_t = r_t if least <= r_t <= threshold, else 0
        decoupled:  w_t = r_t

    Truncated importance sampling: Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL
    training". Masked, and by sequence: Liu et al., 2025, "When speed kills stability". The geometric mean is the ratio
    of a sequence in GSPO (Zheng et al., 2025, arXiv:2507.18071).

    Decoupled PPO (Hilton et al., 2021, arXiv:2110.00641; for asynchronous training Fu et al., 2025, arXiv:2505.24298)
    has the behavior policy ``mu``, the proximal policy ``pi`` (``old_log_probs``) and the current policy ``p``: the
    loss of a token is ``-w_t min(u_t A_t, clip(u_t) A_t)`` with ``u_t = p_t / pi_t``. It is ``level=token`` with the
    loss ``ppo``; ``truncate`` and ``mask`` limit its weights.

    Off-policy sequence masking (DeepSeek-AI, 2025, "DeepSeek-V3.2", section on scaling GRPO), with the policy before
    the update: ``w_t = 0`` for a response with ``A < 0``, the sum of its advantages, and
    ``1 / |T| sum_{s in T} log(mu_s / pi_s) > off_policy_mask``.

    Args:
        data: ``old_log_probs``, ``rollout_log_probs`` and ``response_mask`` ``[rows, response]``; ``advantages`` too
            with ``off_policy_mask``.
        config: level, mode and limits.

    Raises:
        DataError: a column is missing.
    """
    policy, rollout, mask = columns(data, "old_log_probs", "rollout_log_probs", "response_mask")
    kept = mask.bool()
    log_ratio = torch.where(kept, policy - rollout, 0.0)
    of_response = log_ratio.sum(1, keepdim=True)
    mean = of_response / kept.sum(1, keepdim=True).clamp(min=1)
    by_level = {"none": torch.zeros_like(log_ratio), "token": log_ratio, "sequence": of_response, "geometric": mean}
    ratio = torch.exp(torch.where(kept, by_level[config.level], 0.0).clamp(-20.0, 20.0))
    outside = (ratio > config.threshold) & (config.mode != "decoupled")
    if config.mode == "mask":
        outside |= ratio < config.least
        weights = torch.where(outside, 0.0, ratio)
    else:
        weights = torch.where(outside, config.threshold, ratio)
    tokens = kept.sum().clamp(min=1)
    metrics = {}
    if config.off_policy_mask is not None:
        (advantages,) = columns(data, "advantages")
        worse = torch.where(kept, advantages, 0.0).sum(1, keepdim=True) < 0
        left_out = worse & (-mean > config.off_policy_mask)
        weights = weights * ~left_out
        metrics["training/off_policy_masked_fraction"] = float((left_out & kept).sum() / tokens)
    metrics |= {
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


def version_metrics(data: DataProto, newest: int) -> dict[str, float]:
    """Return the share of the sampled tokens that are each number of updates behind, and their mismatch.

    ``training/tokens_behind_<d>`` is the share of tokens of the version ``newest - d``, and
    ``training/rollout_kl_behind_<d>`` the mean of ``log p_rollout - log p_policy`` over them.

    Args:
        data: ``token_versions`` and ``response_mask`` ``[rows, response]``; ``old_log_probs`` and ``rollout_log_probs``
            for the mismatch.
        newest: the version of the policy before its next update.

    Raises:
        DataError: a column is missing.
    """
    versions, mask = columns(data, TOKEN_VERSIONS, "response_mask")
    kept = mask.bool()
    behind, metrics = newest - versions[kept], dict[str, float]()
    known = {"old_log_probs", "rollout_log_probs"} <= {*data.tensor_names}
    if known:
        policy, rollout = (column[kept].double() for column in columns(data, "old_log_probs", "rollout_log_probs"))
    for distance in sorted({*behind.tolist()}):
        some = behind == distance
        metrics[f"training/tokens_behind_{distance}"] = float(some.double().mean())
        if known:
            metrics[f"training/rollout_kl_behind_{distance}"] = float((rollout - policy)[some].mean())
    return metrics
