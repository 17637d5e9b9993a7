"""Metrics of a step, from its batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from mcontroller.data.protocol import DataProto
from mcontroller.ppo.data import columns
from mcontroller.ppo.estimators.built_in import groups_of, outcomes
from mcontroller.ppo.rewards.reward import Reward
from mcontroller.ppo.selection import GroupFilter, truncated_rows

__all__ = [
    "experience_metrics",
    "group_metrics",
    "mean_of_parts",
    "reward_metrics",
    "signal_metrics",
    "validation_metrics",
]


def mean_of_parts(update: DataProto) -> dict[str, float]:
    """Return the metrics of an update: the mean over data-parallel ranks, which report the same reduced values."""
    metrics: Mapping[str, float | Sequence[float]] = update.meta_info["metrics"]
    return {
        name: float(value) if isinstance(value, int | float) else sum(value) / len(value)
        for name, value in metrics.items()
    }


def reward_metrics(prefix: str, reward: Reward) -> dict[str, float]:
    """Return statistics of the responses' scores, and mean and deviation of every further column: ``prefix/...``.

    ``unscored`` is the share of responses without a score; the others are over those with one. ``score`` is the mean
    score; ``score_std``, ``score_min`` and ``score_max`` are over responses too. A column is reported as its mean under
    its name, and ``<name>_std``, over the rows that it applies to.
    """
    scores = reward.row_scores()
    metrics: dict[str, float] = {"unscored": _mean(scores.isnan().float())}
    scores = scores[~scores.isnan()]
    if len(scores):
        spread = {"score_std": scores.std(correction=0), "score_min": scores.min(), "score_max": scores.max()}
        metrics |= {"score": float(scores.mean())} | {name: float(value) for name, value in spread.items()}
    for name, values in reward.columns.items():
        column = torch.as_tensor(values, dtype=torch.float64)
        column = column[~column.isnan()]
        if len(column):
            metrics |= {name: float(column.mean()), f"{name}_std": float(column.std(correction=0))}
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def experience_metrics(batch: DataProto, eos_token_ids: Collection[int] = ()) -> dict[str, float]:
    """Return statistics of the responses that are trained on, and the quality of the critic's values.

    ``response/truncated`` is the share of responses that were cut off: see ``truncated_rows``.
    ``critic/explained_variance`` is ``1 - var(returns - values) / var(returns)``: 1 for a perfect critic, 0 for one
    that predicts the mean; left out if all returns are equal.

    Args:
        batch: ``response_mask`` and ``responses`` ``[rows, response]``; ``returns`` and ``values`` of a critic.
        eos_token_ids: the stop tokens.
    """
    batch = _with_response(batch)
    (mask,) = columns(batch, "response_mask")
    mask = mask.bool()
    lengths = mask.sum(1)
    metrics = {"response/rows": float(len(batch))}
    if not len(batch):
        return metrics
    metrics |= {
        "response/length": float(lengths.float().mean()),
        "response/length_min": float(lengths.min()),
        "response/length_max": float(lengths.max()),
    }
    if "responses" in batch.tensor_names:
        metrics["response/truncated"] = float(truncated_rows(batch, eos_token_ids).float().mean())
    if "values" in batch.tensor_names:
        returns, values = (column[mask] for column in columns(batch, "returns", "values"))
        variance = float(returns.var(correction=0)) if len(returns) else 0.0
        if variance > 1e-12 * max(1.0, float(returns.square().mean())):
            metrics["critic/explained_variance"] = 1.0 - float((returns - values).var(correction=0)) / variance
    return metrics


def signal_metrics(batch: DataProto) -> dict[str, float]:
    """Return the size of the advantages, overall and in groups of equal scores.

    ``advantages/abs_mean_equal`` is the mean ``|advantage|`` in groups of equal scores, which is 0 unless something
    else than the scores is trained on.

    Args:
        batch: ``advantages``, ``token_level_scores`` and ``response_mask`` ``[rows, response]``, and the non-tensor
            column ``uid`` if responses are grouped.
    """
    batch = _with_response(batch)
    advantages, mask = columns(batch, "advantages", "response_mask")
    kept, sizes = mask.bool(), advantages.abs()
    metrics = {"advantages/abs_mean": _mean(sizes[kept])}
    if "uid" in batch.non_tensor_batch:
        equal = groups_of(batch).equal(outcomes(batch, 1.0).scores)
        metrics["advantages/abs_mean_equal"] = _mean(sizes[kept & equal[:, None]])
    return metrics


def group_metrics(groups: GroupFilter) -> dict[str, float]:
    """Return ``train/frac_reward_zero_std``, the share of prompts whose responses have equal scores, of all drawn."""
    equal = groups.without_signal()
    return {"train/frac_reward_zero_std": _mean(equal.float())}


def validation_metrics(reward: Reward, n: int) -> dict[str, float]:
    """Return statistics of the scores of ``n`` responses to each problem, under ``held_out/``.

    ``score`` is the mean over all responses. With more than one response, ``mean_at_<n>`` is that mean as well,
    ``best_at_<n>`` the mean over problems of the best score, and, if the reward has ``answers``, ``maj_at_<n>`` the
    mean over problems of the score of the most frequent answer, of several the one that occurs first. Responses without
    a score do not count.

    Args:
        reward: of the responses; those to one problem are neighbors.
        n: responses to each problem.
    """
    metrics = reward_metrics("held_out", reward)
    if n == 1:
        return metrics
    best, voted, scores = [], [], reward.row_scores().view(-1, n).tolist()
    for problem, of_problem in enumerate(scores):
        rows = [row for row in range(n) if not math.isnan(of_problem[row])]
        if not rows:
            continue
        best.append(max(of_problem[row] for row in rows))
        if reward.answers is not None:
            answers = [reward.answers[problem * n + row] for row in rows]
            voted.append(of_problem[rows[answers.index(Counter(answers).most_common(1)[0][0])]])
    if best:
        metrics |= {f"held_out/mean_at_{n}": metrics["held_out/score"], f"held_out/best_at_{n}": fmean(best)}
    if voted:
        metrics[f"held_out/maj_at_{n}"] = fmean(voted)
    return metrics


def _with_response(batch: DataProto) -> DataProto:
    """Return the rows that have response tokens."""
    kept = columns(batch, "response_mask")[0].any(1)
    return batch if bool(kept.all()) else batch.select_idxs(kept.nonzero().flatten())


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0
