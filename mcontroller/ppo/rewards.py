"""Reward functions, which score finished responses: the interface between the trainer and a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mcontroller.data.protocol import DataProto
from mcontroller.errors import DataError

__all__ = ["Reward", "RewardFunction", "outcome_scores", "rewarded"]


@dataclass(frozen=True)
class Reward:
    """Scores of responses.

    Attributes:
        token_level_scores: float32 ``[rows, response]``; ``outcome_scores`` makes it from one score per response.
        columns: further values of every row, such as its ``accuracy``; their means are reported.
    """

    token_level_scores: Tensor
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)


class RewardFunction(Protocol):
    """A function from a batch to its Reward."""

    def __call__(self, batch: DataProto) -> Reward | Tensor:
        """Return the Reward of a batch, or its ``token_level_scores`` alone.

        Args:
            batch: the result of ``generate_sequences``, and the non-tensor columns of the data set.
        """


def outcome_scores(scores: Sequence[float] | Tensor, response_mask: Tensor) -> Tensor:
    """Return one score per response, ``[rows]``, on its last token: float32 ``[rows, response]``."""
    last = response_mask.shape[1] - 1 - response_mask.flip(1).argmax(1)
    on_tokens = torch.zeros(response_mask.shape, dtype=torch.float32)
    return on_tokens.scatter_(1, last.unsqueeze(1), torch.as_tensor(scores, dtype=torch.float32).unsqueeze(1))


def rewarded(reward_fn: RewardFunction, batch: DataProto) -> Reward:
    """Return the Reward of a batch.

    Raises:
        DataError: the function returned values that do not have the shape of the responses.
    """
    result = reward_fn(batch)
    reward = result if isinstance(result, Reward) else Reward(result)
    expected = tuple(batch.tensors()["response_mask"].shape)
    if tuple(reward.token_level_scores.shape) != expected:
        raise DataError(
            f"the reward function returned token_level_scores of shape {tuple(reward.token_level_scores.shape)}; "
            f"expected {expected}, the shape of response_mask",
            shape=tuple(reward.token_level_scores.shape),
            expected=expected,
        )
    for name, column in reward.columns.items():
        if len(column) != expected[0]:
            raise DataError(
                f"the reward function returned {len(column)} values of {name!r} for {expected[0]} responses",
                column=name,
                length=len(column),
                expected=expected[0],
            )
    return reward
