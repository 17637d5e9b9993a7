"""Losses of tokens as pure functions: policy, value, cross entropy.

No loss is averaged in this file: the pipeline sums it over the mask and divides it by what it counts in the whole
global mini-batch. Policy losses by name are in ``mcontroller.ppo.losses``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce

from mcontroller.ppo.kl import estimate_kl
from mcontroller.ppo.losses.registry import AGGREGATIONS, POLICY_LOSSES, PolicyLoss, Weights
from workers.config import ActorConfig
from workers.train.batches import TokenBatch
from workers.train.metrics import TOKENS, Rule


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


def over_context(values: Tensor, context_parallel: ProcessGroup) -> Tensor:
    """Return the sum over context-parallel ranks, with gradients for the values of this rank."""
    if context_parallel.size() == 1:
        return values
    own = values.detach()
    of_all = own.clone()
    all_reduce(of_all, group=context_parallel)
    return of_all + (values - own)


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


MISMATCH: Mapping[str, Rule] = {
    "training/rollout_probs_diff_mean": Rule.TOKEN_MEAN,
    "training/rollout_probs_diff_max": Rule.MAX,
    "training/rollout_kl": Rule.TOKEN_MEAN,
}
"""Differences between rollout and policy, as in ``mismatch_metrics``, if the batch has ``rollout_log_probs``."""


def columns_of_update(config: ActorConfig, present: set[str]) -> list[str]:
    """Return the columns that ``policy_objective`` reads, ``[rows, response]``.

    Args:
        config: the configuration of the actor.
        present: the columns of the batch; ``importance_weights``, ``rollout_log_probs`` and ``old_log_probs`` are read
            if they are there.
    """
    needed = ["advantages", *POLICY_LOSSES[config.policy_loss].columns]
    needed += ["ref_log_prob"] * bool(config.use_kl_loss)
    optional = ("old_log_probs", "importance_weights", "rollout_log_probs")
    return needed + [name for name in optional if name in present and name not in needed]


def weights_of(config: ActorConfig, own: Tensor, whole: Tensor) -> Weights:
    """Return the weights of tokens in the average of the loss, and their count; the masks are as in ``Aggregation``."""
    average = AGGREGATIONS[config.loss_agg_mode or POLICY_LOSSES[config.policy_loss].loss_agg_mode]
    return average(own, whole, config.rollout.response_length)


def policy_objective(
    config: ActorConfig, rows: TokenBatch, log_probs: Tensor, entropy: Tensor, context_parallel: ProcessGroup
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the weighted sum of the losses of tokens, its divisor, and the report for ``policy_metrics``.

    Args:
        config: the configuration of the actor.
        rows: a micro-batch with the columns of ``columns_of_update``, its ``mask`` and its ``whole_mask``.
        log_probs: ``[rows, response]``, with gradients; 0 for targets of other context-parallel ranks.
        entropy: the same.
        context_parallel: the process group of the cp axis.
    """
    assert rows.whole_mask is not None
    registered, columns = POLICY_LOSSES[config.policy_loss], rows.columns
    policy = _policy_loss(config, rows, log_probs, context_parallel)
    weights = weights_of(config, rows.mask, rows.whole_mask)
    per_token = policy.loss * columns.get("importance_weights", 1.0)
    token_means = {
        "pg_clipfrac": policy.clipped,
        "pg_clipfrac_low": policy.clipped * (columns["advantages"] < 0),
        "pg_clipfrac_high": policy.clipped * (columns["advantages"] > 0),
        "ppo_kl": _old_log_probs(rows, log_probs) - log_probs,
        "entropy": entropy,
    }
    total = masked_sum(per_token, weights.tokens)
    pg_loss = total.detach()
    if registered.whole_sequences:  # tokens of other ranks have gradients by the log-probabilities of this rank too
        every = weights_of(config, rows.whole_mask, rows.whole_mask).tokens
        others = masked_sum(per_token, every * (rows.mask == 0))
        total = total + others - others.detach()
    extra = -config.entropy_coeff * entropy
    if config.use_kl_loss:
        kl = estimate_kl(log_probs, columns["ref_log_prob"], config.kl_loss_type)
        extra = extra + config.kl_loss_coef * kl
        token_means["kl_loss"] = kl
    if "rollout_log_probs" in columns:
        rollout = columns["rollout_log_probs"]
        difference = (rollout.exp() - log_probs.exp()).abs()
        token_means["training/rollout_probs_diff_mean"] = difference
        token_means["training/rollout_kl"] = rollout - log_probs
    report = {name: masked_sum(values.detach(), rows.mask) for name, values in token_means.items()}
    report["pg_loss"] = pg_loss
    report["ratio_max"] = (policy.ratio.detach() * rows.mask).max()
    if "rollout_log_probs" in columns:
        report["training/rollout_probs_diff_max"] = (difference.detach() * rows.mask).max()
    return total + masked_sum(extra, weights.tokens), weights.count, report | {TOKENS: rows.mask.sum()}


def policy_metrics(config: ActorConfig) -> dict[str, Rule]:
    """Return how the values that ``policy_objective`` reports are reduced."""
    means = ["pg_clipfrac", "pg_clipfrac_low", "pg_clipfrac_high", "ppo_kl", "entropy"]
    means += ["kl_loss"] * bool(config.use_kl_loss)
    return {"pg_loss": Rule.LOSS_MEAN} | dict.fromkeys(means, Rule.TOKEN_MEAN) | {"ratio_max": Rule.MAX}


def _policy_loss(
    config: ActorConfig, rows: TokenBatch, log_probs: Tensor, context_parallel: ProcessGroup
) -> PolicyLoss:
    """Return the policy loss of this context-parallel rank's tokens, or of all tokens if it combines them."""
    registered, mask = POLICY_LOSSES[config.policy_loss], rows.mask
    if registered.whole_sequences and rows.whole_mask is not None:
        mask = rows.whole_mask
        log_probs = over_context(log_probs, context_parallel)
    extra = {"columns": {name: rows.columns[name] for name in registered.columns}} if registered.columns else {}
    clip_low, clip_high = config.clip_limits()
    return registered.function(
        log_probs,
        _old_log_probs(rows, log_probs),
        rows.columns["advantages"],
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=config.clip_ratio_c,
        **extra,
    )


def _old_log_probs(rows: TokenBatch, log_probs: Tensor) -> Tensor:
    """Return the log-probabilities before the update: the batch's, or else the present ones."""
    return rows.columns["old_log_probs"] if "old_log_probs" in rows.columns else log_probs.detach()
