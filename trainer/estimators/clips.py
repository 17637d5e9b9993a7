"""Limits of scores and of advantages: ``algorithm.reward_clip`` and ``algorithm.advantage_clip``."""

from __future__ import annotations

import torch
from torch import Tensor

from mcontroller.data.batch import DataProto
from trainer.columns import columns
from trainer.rewards.reward import outcome_scores


def clipped_scores(data: DataProto, clip: float | None) -> tuple[DataProto, dict[str, float]]:
    """Return the batch with the score of every response between ``-clip`` and ``clip``, and the share that was limited.

    What is beyond the limit is subtracted on the last token of the response. ``greedy_scores`` are limited too.

    Args:
        data: ``token_level_scores`` and ``response_mask`` ``[rows, response]``; ``greedy_scores`` ``[rows]`` for remax.
        clip: the limit. None: the batch is returned as it is.

    Raises:
        DataError: a column is missing.
    """
    if clip is None:
        return data, {}
    scores, mask = columns(data, "token_level_scores", "response_mask")
    scores = torch.where(mask.bool(), scores, 0.0)
    sums = scores.sum(1)
    clipped = scores - outcome_scores(sums - sums.clamp(-clip, clip), mask)
    share, limited = _share_beyond(sums[mask.bool().any(1)], clip), {"token_level_scores": clipped}
    if "greedy_scores" in data.tensor_names:
        limited["greedy_scores"] = columns(data, "greedy_scores")[0].clamp(-clip, clip)
    return data.with_tensors(limited), {"train/score_clipped": share}


def clipped_advantages(data: DataProto, clip: float | None) -> tuple[DataProto, dict[str, float]]:
    """Return the batch with every advantage between ``-clip`` and ``clip``, and the share that was limited.

    ``returns``, which the critic learns, stay as they are. Arguments and errors as of ``clipped_scores``.
    """
    if clip is None:
        return data, {}
    advantages, mask = columns(data, "advantages", "response_mask")
    share = _share_beyond(advantages[mask.bool()], clip)
    return data.with_tensors({"advantages": advantages.clamp(-clip, clip)}), {"advantages/clipped": share}


def _share_beyond(values: Tensor, clip: float) -> float:
    return float((values.abs() > clip).float().mean()) if values.numel() else 0.0
