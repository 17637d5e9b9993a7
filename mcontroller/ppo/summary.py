"""Metrics of a step, from its batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from mcontroller.data.protocol import DataProto
from mcontroller.ppo.data import columns
from mcontroller.ppo.estimators.outcomes import groups_of, outcomes
from mcontroller.ppo.rewards import Reward

__all__ = ["experience_metrics", "mean_of_parts", "reward_metrics", "signal_metrics"]


def mean_of_parts(update: DataProto) -> dict[str, float]:
    """Return the metrics of an update: the mean over data-parallel ranks, which report the same reduced values."""
    metrics: Mapping[str, float | Sequence[float]] = update.meta_info["metrics"]
    return {
        name: float(value) if isinstance(value, int | float) else sum(value) / len(value)
        for name, value in metrics.items()
    }


def reward_metrics(prefix: str, reward: Reward) -> dict[str, float]:
    """Return statistics of the responses' scores, and mean and deviation of every further column: ``prefix/...``.

    ``score`` is the mean score; ``score_std``, ``score_min`` and ``score_max`` are over responses too. A column is
    reported as its mean under its name, and ``<name>_std``, over the rows that it applies to.
    """
    scores = reward.token_level_scores.sum(1)
    metrics: dict[str, float] = {}
    if len(scores):
        spread = {"score_std": scores.std(correction=0), "score_min": scores.min(), "score_max": scores.max()}
        metrics = {"score": float(scores.mean())} | {name: float(value) for name, value in spread.items()}
    for name, values in reward.columns.items():
        column = torch.as_tensor(values, dtype=torch.float64)
        column = column[~column.isnan()]
        if len(column):
            metrics |= {name: float(column.mean()), f"{name}_std": float(column.std(correction=0))}
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def experience_metrics(batch: DataProto, eos_token_ids: Collection[int] = ()) -> dict[str, float]:
    """Return statistics of the responses, and the quality of the critic's values.

    ``response/truncated`` is the share of responses that have the full width and do not end with a stop token.
    ``critic/explained_variance`` is ``1 - var(returns - values) / var(returns)``: 1 for a perfect critic, 0 for one
    that predicts the mean; left out if all returns are equal.

    Args:
        batch: ``response_mask`` and ``responses`` ``[rows, response]``; ``returns`` and ``values`` of a critic.
        eos_token_ids: the stop tokens.
    """
    (mask,) = columns(batch, "response_mask")
    mask = mask.bool()
    lengths = mask.sum(1)
    metrics = {
        "response/rows": float(len(batch)),
        "response/length": float(lengths.float().mean()),
        "response/length_min": float(lengths.min()),
        "response/length_max": float(lengths.max()),
    }
    if "responses" in batch.tensors():
        last = batch.tensors()["responses"][:, -1]
        stopped = torch.isin(last, torch.tensor(list(eos_token_ids), dtype=last.dtype))
        metrics["response/truncated"] = float((mask[:, -1] & ~stopped).float().mean())
    if "values" in batch.tensors():
        returns, values = (column[mask] for column in columns(batch, "returns", "values"))
        variance = float(returns.var(correction=0)) if len(returns) else 0.0
        if variance > 1e-12 * max(1.0, float(returns.square().mean())):
            metrics["critic/explained_variance"] = 1.0 - float((returns - values).var(correction=0)) / variance
    return metrics


def signal_metrics(batch: DataProto) -> dict[str, float]:
    """Return the size of the advantages, and how many groups of responses to one prompt have a signal.

    ``advantages/groups_equal`` is the share of groups with equal scores, and ``advantages/abs_mean_equal`` the mean
    ``|advantage|`` in them, which is 0 unless something else than the scores is trained on.

    Args:
        batch: ``advantages``, ``token_level_scores`` and ``response_mask`` ``[rows, response]``, and the non-tensor
            column ``uid`` if responses are grouped.
    """
    advantages, mask = columns(batch, "advantages", "response_mask")
    kept = mask.bool()
    metrics = {"advantages/abs_mean": _mean(advantages.abs()[kept])}
    if "uid" in batch.non_tensor_batch:
        groups = groups_of(batch)
        equal = groups.equal(outcomes(batch, 1.0).scores)
        metrics["advantages/groups_equal"] = float((equal / groups.sizes).sum() / (1 / groups.sizes).sum())
        metrics["advantages/abs_mean_equal"] = _mean(advantages.abs()[kept & equal[:, None]])
    return metrics


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0
