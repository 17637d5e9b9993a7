"""The losses of roles: policy, value, cross entropy; and what a loss of a program has to return.

A loss is the sum over the tokens of this rank, and what it counts. ``Gradients`` in ``workers.train.trainer`` divides
by the count of the whole global mini-batch. Policy losses by name are in ``workers.losses.policy``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce

from mcontroller.errors import ConfigError
from workers.config import ActorConfig
from workers.losses.kl import estimate_kl
from workers.losses.masking import inside
from workers.losses.policy import (
    AGGREGATIONS,
    POLICY_LOSSES,
    TOKEN_MEANS,
    PolicyLoss,
    Weights,
    check_names,
    check_of_tokens,
)
from workers.train.batches import TokenBatch
from workers.train.metrics import TOKENS, Rule, checked_rules

MISMATCH: Mapping[str, Rule] = {
    "training/rollout_probs_diff_mean": Rule.TOKEN_MEAN,
    "training/rollout_probs_diff_max": Rule.MAX,
    "training/rollout_kl": Rule.TOKEN_MEAN,
}
"""Differences between rollout and policy, as in ``mismatch_metrics``, if the batch has ``rollout_log_probs``."""


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
    local = values.detach()
    of_all = local.clone()
    all_reduce(of_all, group=context_parallel)
    return of_all + (values - local)


def checked_loss(name: str, returned: Any, rows: TokenBatch, output: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return a loss that can be trained, its count, and its report without gradients.

    The loss of rows whose mask is 0 may be a constant. It is given gradients of 0 then, since DistributedDataParallel
    waits for every parameter's.

    Args:
        name: of the loss, for error messages.
        returned: by the loss; see ``ModelWorker.loss``.
        rows: what it was called with.
        output: the same.

    Raises:
        ConfigError: what it returned is something else, or is no scalar, or the loss has no gradients.
    """
    match returned:
        case (Tensor() as total, Tensor() as count, Mapping() as report):
            values = {"the loss": total, "the count": count, **report}
        case _:
            raise ConfigError(
                f"{name} returned {_types(returned)}; expected the sum of the loss and the number that it is divided "
                "by, two tensors, and a dict of values to report",
                key="loss",
            )
    for which, value in values.items():
        if not isinstance(value, Tensor) or value.dim():
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"{name}: {which} is {shape}; expected a scalar tensor", key="loss", value=which)
    if not total.requires_grad:
        if bool(rows.mask.any()):
            raise ConfigError(
                f"{name} has no gradients, so that nothing would be trained: compute it from the output without "
                "detach(), item() or torch.no_grad()",
                key="loss",
            )
        total = total + masked_sum(output, torch.zeros_like(output))
    return total, count.detach(), {which: value.detach() for which, value in report.items()}


def checked_output(output: Any, shape: Sequence[int], what: str) -> Tensor:
    """Return the output of ``forward_step`` on the last stage.

    Args:
        output: what it returned.
        shape: of the tensor that is expected.
        what: the values that it has.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(output, Tensor) or output.shape != torch.Size(shape):
        given = list(output.shape) if isinstance(output, Tensor) else f"of type {_types(output)}"
        text = f"the output of forward_step on the last stage is {given}; expected a tensor {list(shape)}, {what}"
        raise ConfigError(text, key="forward_step")
    return output


def _types(returned: Any) -> str:
    values = returned if isinstance(returned, tuple) else (returned,)
    return ", ".join(type(value).__name__ for value in values)


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


def weights_of(config: ActorConfig, local: Tensor, whole: Tensor) -> Weights:
    """Return the weights of tokens in the average of the loss, and their count; the masks are as in ``Aggregation``."""
    name = config.loss_agg_mode or POLICY_LOSSES[config.policy_loss].loss_agg_mode
    weights = AGGREGATIONS[name](local, whole, config.rollout.response_length)
    if not isinstance(weights, Weights) or weights.tokens.shape != local.shape:
        text = f"loss_agg_mode={name} returned {_types(weights)}; expected Weights(tokens, count), tokens "
        raise ConfigError(f"{text}{list(local.shape)}", key="loss_agg_mode", value=name)
    return weights


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
        **policy.metrics,
    }
    total = masked_sum(per_token, weights.tokens)
    pg_loss = total.detach()
    if registered.whole_sequences:  # tokens of other ranks have gradients by the log-probabilities of this rank too
        every = weights_of(config, rows.whole_mask, rows.whole_mask).tokens
        others = masked_sum(per_token, every * (rows.mask == 0))
        total = total + others - others.detach()
    extra = -config.entropy_coeff * entropy
    if config.use_kl_loss:
        reference, kind, clip = columns["ref_log_prob"], config.kl_loss_type, config.kl_loss_clip
        kl = estimate_kl(log_probs, reference, kind, clip, key="kl_loss_type")
        extra = extra + config.kl_loss_coef * kl
        token_means["kl_loss"] = kl
    if "rollout_log_probs" in columns:
        rollout = columns["rollout_log_probs"]
        difference = (rollout.exp() - log_probs.exp()).abs()
        token_means["training/rollout_probs_diff_mean"] = difference
        token_means["training/rollout_kl"] = rollout - log_probs
    report = {name: masked_sum(values.detach(), rows.mask) for name, values in token_means.items()}
    report["pg_loss"] = pg_loss
    report["ratio_max"] = inside(policy.ratio.detach(), rows.mask).max()
    if "rollout_log_probs" in columns:
        report["training/rollout_probs_diff_max"] = inside(difference.detach(), rows.mask).max()
    return total + masked_sum(extra, weights.tokens), weights.count, report | {TOKENS: rows.mask.sum()}


def policy_metrics(config: ActorConfig) -> dict[str, Rule]:
    """Return how the values that ``policy_objective`` reports are reduced."""
    means = [*TOKEN_MEANS, *POLICY_LOSSES[config.policy_loss].metrics, *["kl_loss"] * bool(config.use_kl_loss)]
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
    policy = registered.function(
        log_probs,
        _old_log_probs(rows, log_probs),
        rows.columns["advantages"],
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=config.clip_ratio_c,
        **extra,
    )
    name, expected = config.policy_loss, "expected PolicyLoss(loss, ratio, clipped, metrics)"
    if not isinstance(policy, PolicyLoss) or not isinstance(policy.metrics, Mapping):
        given = f"metrics {policy.metrics!r}" if isinstance(policy, PolicyLoss) else _types(policy)
        raise ConfigError(f"policy_loss={name} returned {given}; {expected}", key="policy_loss", value=name)
    if policy.metrics.keys() != set(registered.metrics):
        names = f"the metrics {sorted(policy.metrics)}; it is registered with metrics={registered.metrics}"
        raise ConfigError(f"policy_loss={name} returned {names}", key="policy_loss", value=name)
    tensors = {"loss": policy.loss, "ratio": policy.ratio, "clipped": policy.clipped, **policy.metrics}
    check_of_tokens("policy_loss", name, tensors, log_probs)
    return policy


def _old_log_probs(rows: TokenBatch, log_probs: Tensor) -> Tensor:
    """Return the log-probabilities before the update: the batch's, or else the present ones."""
    return rows.columns["old_log_probs"] if "old_log_probs" in rows.columns else log_probs.detach()


# ---- losses that a program passes to forward_backward ----------------------------------------------------------------


@dataclass(frozen=True)
class TokenLoss:
    """A loss of whole rows, for ``forward_backward(batch, loss=...)``; it is pickled, as a function of a call is.

    ``function(rows, output)`` returns the sum of the loss over a micro-batch, the number that the sum over the
    mini-batch is divided by, and a report with every name in ``metrics``. ``rows`` has the ``columns``, and a mask
    ``[rows, targets]`` that is 0 for targets that do not count, and in all of a row that only fills the micro-batch.
    ``output`` is float32 ``[2, rows, targets]``: log-probabilities and entropies. If ``columns`` has ``top_ids``
    ``[rows, targets, k]``, the log-probabilities of these tokens follow: ``[2 + k, rows, targets]``. The function gets
    all targets of its rows, also under context parallelism.

    Attributes:
        name: prefix of the metrics, of which one is ``name/loss``.
        function: as above; a report for ``Rule.TOKEN_MEAN`` is a sum over the mask, for ``LOSS_MEAN`` over what counts.
        columns: the columns that it reads, besides those of responses.
        metrics: how the values of its report are reduced.
        supervised: whether the targets are the tokens with a ``loss_mask`` of 1, and not the responses.

    Raises:
        ConfigError: ``columns`` is a string, or ``metrics`` has something else than rules.

    Examples:
        >>> policy.forward_backward(batch)
        >>> policy.forward_backward(supervised_rows(others), loss=SFT, accumulate=True)
        >>> policy.optim_step()
    """

    name: str
    function: Callable[[TokenBatch, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
    columns: tuple[str, ...] = ()
    metrics: Mapping[str, Rule] = field(default_factory=dict)
    supervised: bool = False

    def __post_init__(self) -> None:
        check_names("TokenLoss.columns", self.columns)
        checked_rules(self.metrics, "TokenLoss.metrics")

    @property
    def rules(self) -> dict[str, Rule]:
        """How the values that ``on_rank`` reports are reduced."""
        return {"loss": Rule.LOSS_MEAN, **self.metrics}

    def on_rank(
        self, context_parallel: ProcessGroup, rows: TokenBatch, output: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss as ``ModelWorker.loss`` does: this rank's share of counts, gradients of its own targets.

        Args:
            context_parallel: the process group of the cp axis.
            rows: a micro-batch with its ``whole_mask``.
            output: of ``forward_step``, 0 for targets of other ranks.

        Raises:
            ConfigError: the function returns other values, or a loss without gradients.
        """
        name, ranks = f"TokenLoss {self.name!r}", context_parallel.size()
        whole = rows if rows.whole_mask is None else replace(rows, mask=rows.whole_mask)
        output = over_context(output, context_parallel)
        total, count, report = checked_loss(name, self.function(whole, output), whole, output)
        if missing := sorted(self.metrics.keys() - report.keys()):
            raise ConfigError(f"{name} reports no {', '.join(missing)}, which its metrics name", key="loss")
        report = {"loss": total.detach(), **report}
        shares = {name: report[name] / (1 if rule is Rule.MAX else ranks) for name, rule in self.rules.items()}
        return total, count / ranks, shares | {TOKENS: whole.mask.sum() / ranks}


def _distillation(rows: TokenBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    teacher = rows.columns["top_log_probs"]
    divergence = (teacher.exp() * (teacher - output[2:].movedim(0, -1))).sum(-1)
    return masked_sum(divergence, rows.mask), rows.mask.sum(), {"entropy": masked_sum(output[1], rows.mask)}


SFT = TokenLoss("sft", sft_loss, metrics={"entropy": Rule.TOKEN_MEAN}, supervised=True)
"""Cross entropy of the tokens with a ``loss_mask`` of 1, as ``update_sft``."""

DISTILLATION = TokenLoss(
    "distillation", _distillation, ("top_ids", "top_log_probs"), metrics={"entropy": Rule.TOKEN_MEAN}
)
"""KL divergence of the teacher to the student per token, ``sum p_teacher (log p_teacher - log p_student)``.

The sum is over the tokens of ``compute_top_log_probs``: with all of the vocabulary it is exact (Hinton et al., 2015,
arXiv:1503.02531; on responses of the student: Agarwal et al., 2023, arXiv:2306.13649).
"""
