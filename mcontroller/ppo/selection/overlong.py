"""Responses that are too long: a penalty on the score that grows with the length, and which responses are cut off."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from mcontroller.config.checks import check_at_least
from mcontroller.config.fields import strict_fields
from mcontroller.data.protocol import DataProto
from mcontroller.ppo.data import columns
from mcontroller.ppo.rewards import Reward, outcome_scores

__all__ = ["OverlongConfig", "penalized", "truncated_rows"]


@strict_fields
@dataclass(frozen=True, slots=True)
class OverlongConfig:
    """DAPO's soft penalty for responses that are almost, or exactly, as long as the longest possible one."""

    buffer: int = 0
    """[tokens] Tokens before ``rollout.response_length`` in which the penalty grows from 0. 0: no penalty."""
    penalty: float = 1.0
    """Penalty of a response of the full length, subtracted from its score."""

    def __post_init__(self) -> None:
        check_at_least("algorithm.overlong.buffer", self.buffer, 0)
        check_at_least("algorithm.overlong.penalty", self.penalty, 0.0)


def penalized(reward: Reward, response_mask: Tensor, config: OverlongConfig, limit: int) -> Reward:
    """Return the reward with the length penalty on the last token of every response, and as a column.

    With ``L`` the longest possible response and ``b`` the buffer, a response of ``l`` tokens loses
    ``penalty * clip((l - (L - b)) / b, 0, 1)`` (Yu et al., 2025, arXiv:2503.14476, equation 13). The tokens of an
    environment between those of the policy count, because they take room too.

    Args:
        reward: the reward of a batch.
        response_mask: ``[rows, response]``, 1 for the tokens of the policy.
        config: penalty, and a buffer of at least 1.
        limit: [tokens] the longest possible response.
    """
    buffer = min(config.buffer, limit)
    beyond = _lengths(response_mask) - (limit - buffer)
    penalty = -config.penalty * (beyond / buffer).clamp(0.0, 1.0)
    scores = reward.token_level_scores + outcome_scores(penalty, response_mask)
    columns_of_rows = {**reward.columns, "overlong_penalty": penalty.tolist()}
    return dataclasses.replace(reward, token_level_scores=scores, columns=columns_of_rows)


def truncated_rows(batch: DataProto, eos_token_ids: Collection[int]) -> Tensor:
    """Return which responses were cut off for lack of room or turns, bool ``[rows]``.

    Args:
        batch: ``truncated`` bool ``[rows]``, which ``MultiTurnRollout`` returns; without it, ``responses`` and
            ``response_mask`` ``[rows, response]``: a response without a stop token at its end was cut off.
        eos_token_ids: the stop tokens.
    """
    if "truncated" in batch.tensor_names:
        return columns(batch, "truncated")[0]
    responses, mask = columns(batch, "responses", "response_mask")
    last = responses.gather(1, (_lengths(mask)[:, None] - 1).clamp(min=0)).squeeze(1)
    return ~torch.isin(last, torch.tensor(list(eos_token_ids), dtype=responses.dtype))


def _lengths(mask: Tensor) -> Tensor:
    """Return the tokens of responses up to the last one of the policy, int64 ``[rows]``; 0 if there is none."""
    return (torch.arange(1, mask.shape[1] + 1) * (mask != 0)).amax(1)
