"""The seam to a task: a reward function looks at finished responses and says what they are worth."""

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
    """What responses are worth.

    Attributes:
        token_level_scores: float32 ``[rows, response]``; see ``outcome_scores`` for one score a response.
        columns: what else is known of every row, such as its ``accuracy``; the means are reported.
    """

    token_level_scores: Tensor
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)


class RewardFunction(Protocol):
    """Gives the Reward of a batch, or its ``token_level_scores`` alone.

    The batch holds what ``generate_sequences`` gave, and the data set's non-tensor columns beside.
    """

    def __call__(self, batch: DataProto) -> Reward | Tensor: ...


def outcome_scores(scores: Sequence[float] | Tensor, response_mask: Tensor) -> Tensor:
    """One score a response, ``[rows]``, on its last token: float32 ``[rows, response]``."""
    last = response_mask.shape[1] - 1 - response_mask.flip(1).argmax(1)
    on_tokens = torch.zeros(response_mask.shape, dtype=torch.float32)
    return on_tokens.scatter_(1, last.unsqueeze(1), torch.as_tensor(scores, dtype=torch.float32).unsqueeze(1))


def rewarded(reward_fn: RewardFunction, batch: DataProto) -> Reward:
    """What the function gives for the batch. Raises DataError where that has not its shape, rows by tokens."""
    given = reward_fn(batch)
    reward = given if isinstance(given, Reward) else Reward(given)
    expected = tuple(batch.tensors()["response_mask"].shape)
    if tuple(reward.token_level_scores.shape) != expected:
        raise DataError(
            f"the reward function gave token_level_scores of shape {tuple(reward.token_level_scores.shape)}; "
            f"the responses are {expected}",
            shape=tuple(reward.token_level_scores.shape),
            expected=expected,
        )
    for name, column in reward.columns.items():
        if len(column) != expected[0]:
            raise DataError(
                f"the reward function gave {len(column)} values of {name!r} for {expected[0]} responses",
                column=name,
                length=len(column),
                expected=expected[0],
            )
    return reward
