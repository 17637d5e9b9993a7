"""Metrics of a step, from its batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mcontroller.data.batch import DataProto
from trainer.columns import columns, response_lengths
from trainer.estimators.built_in import groups_of, outcomes
from trainer.rewards.reward import Reward
from trainer.selection import GroupFilter, truncated_rows

MOST_TOKENS = 2048
"""Most tokens of a sample."""


def reward_metrics(prefix: str, reward: Reward) -> dict[str, float]:
    """Return statistics of the responses' scores, and mean and deviation of every other column: ``prefix/...``.

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


def sample_tokens(batch: DataProto, tokenizer: Any, count: int) -> list[dict[str, list[Any]]]:
    """Return the tokens of the first responses, with what they were trained on.

    Args:
        batch: ``responses``, ``response_mask`` and ``advantages`` ``[rows, response]``; ``old_log_probs`` and
            ``rollout_log_probs`` if there are any.
        tokenizer: without a method ``decode``, nothing is returned.
        count: of responses.

    Returns:
        ``text``, ``advantage`` and, with both log-probabilities, ``mismatch``, the policy's less the engine's, for each
        token of each response; None for tokens that the policy has not sampled.
    """
    decode = getattr(tokenizer, "decode", None)
    if decode is None or not {"responses", "advantages"} <= set(batch.tensor_names):
        return []
    some = batch.select_idxs(torch.arange(min(count, len(batch))))
    ids, mask, advantages = columns(some, "responses", "response_mask", "advantages")
    values = {"advantage": advantages}
    if {"old_log_probs", "rollout_log_probs"} <= set(batch.tensor_names):
        policy, engine = columns(some, "old_log_probs", "rollout_log_probs")
        values["mismatch"] = policy - engine
    samples = []
    lengths = response_lengths(mask).clamp(max=MOST_TOKENS).tolist()
    for row, (of_policy, length) in enumerate(zip(mask.bool(), lengths, strict=True)):
        tokens = ids[row, :length].tolist()
        # A token is what it adds to the text of the one before: some tokenizers drop the space before the first.
        texts = [decode(tokens[:1]), *(decode([*pair]).removeprefix(decode([pair[0]])) for pair in pairwise(tokens))]
        samples.append(
            {"text": texts[: len(tokens)]}
            | {
                name: [
                    float(f"{value:.3g}") if kept else None
                    for value, kept in zip(column[row].tolist(), of_policy.tolist(), strict=True)
                ][: len(tokens)]
                for name, column in values.items()
            }
        )
    return samples


def decoded_samples(batch: DataProto, tokens: Sequence[Mapping[str, list[Any]]]) -> list[dict[str, Any]]:
    """Return what people look at of the first responses, if the reward has decoded none: episodes score themselves.

    Args:
        batch: ``token_level_scores`` ``[rows, response]``, and ``prompt`` and ``answer`` if there are any.
        tokens: what ``sample_tokens`` returned for the batch.
    """
    if not tokens or "token_level_scores" not in batch.tensor_names:
        return []
    (scores,) = columns(batch, "token_level_scores")
    others = {name: batch.non_tensor_batch[name] for name in ("prompt", "answer") if name in batch.non_tensor_batch}
    return [
        {"prompt": ""}
        | {name: column[row] for name, column in others.items()}
        | {"response": "".join(one["text"]), "score": float(scores[row].sum())}
        for row, one in enumerate(tokens)
    ]


def group_metrics(groups: GroupFilter) -> dict[str, float]:
    """Return ``train/frac_reward_zero_std``, the share of prompts whose responses have equal scores, of all drawn."""
    equal = groups.without_signal()
    return {"train/frac_reward_zero_std": _mean(equal.float())}


def _with_response(batch: DataProto) -> DataProto:
    """Return the rows that have response tokens."""
    kept = columns(batch, "response_mask")[0].any(1)
    return batch if bool(kept.all()) else batch.select_idxs(kept.nonzero().flatten())


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0
