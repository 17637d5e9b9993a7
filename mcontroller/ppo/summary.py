"""Metrics of a step, from its batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mcontroller.data.protocol import DataProto
from mcontroller.ppo.data import columns
from mcontroller.ppo.rewards import Reward

__all__ = ["experience_metrics", "mean_of_parts", "reward_metrics"]


def mean_of_parts(update: DataProto) -> dict[str, float]:
    """Return the metrics of an update: the mean over data-parallel ranks, which report the same reduced values."""
    metrics: Mapping[str, float | Sequence[float]] = update.meta_info["metrics"]
    return {
        name: float(value) if isinstance(value, int | float) else sum(value) / len(value)
        for name, value in metrics.items()
    }


def reward_metrics(prefix: str, reward: Reward) -> dict[str, float]:
    """Return the mean score of the responses and the mean of every further column, named ``prefix/...``."""
    scores = reward.token_level_scores.sum(1)
    means = {name: sum(column) / max(len(column), 1) for name, column in reward.columns.items()}
    return {f"{prefix}/{name}": value for name, value in ({"score": float(scores.mean())} | means).items()}


def experience_metrics(batch: DataProto) -> dict[str, float]:
    """Return the mean length of the responses, and the quality of the critic's values.

    ``critic/explained_variance`` is ``1 - var(returns - values) / var(returns)``: 1 for a perfect critic, 0 for one
    that predicts the mean.
    """
    mask = columns(batch, "response_mask")[0].bool()
    metrics = {"response/length": float(mask.sum(1).float().mean())}
    if "values" in batch.tensors():
        returns, values = (column[mask] for column in columns(batch, "returns", "values"))
        explained = 1.0 - (returns - values).var(correction=0) / returns.var(correction=0).clamp(min=1e-8)
        metrics["critic/explained_variance"] = float(explained)
    return metrics
