"""Scores of whole responses, the groups of responses to one prompt, and their statistics."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcontroller.data.protocol import DataProto
from mcontroller.errors import DataError
from mcontroller.ppo.data import columns
from mcontroller.ppo.estimators.token_sums import discounted_sums, inside, packed_left, unpacked

__all__ = ["Groups", "Outcomes", "groups_of", "outcomes"]


@dataclass(frozen=True)
class Groups:
    """Responses to the same prompt, and statistics over them.

    Attributes:
        index: int64 ``[rows]``, the group of every row: 0, 1, ... in the order of the first occurrence of its ``uid``.
    """

    index: Tensor

    @property
    def sizes(self) -> Tensor:
        """Rows in the group of each row, float64 ``[rows]``."""
        return torch.bincount(self.index)[self.index].double()

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` ``[rows]`` over the group of each row, float64 ``[rows]``."""
        groups = int(self.index.max()) + 1 if len(self.index) else 0
        return torch.zeros(groups, dtype=torch.float64).index_add(0, self.index, values.double())[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` ``[rows]`` over the group of each row; exact if they are equal."""
        return torch.where(self.equal(values), values.double(), self.sums(values) / self.sizes)

    def std(self, values: Tensor) -> Tensor:
        """Return the standard deviation (divided by the rows of the group) of ``values`` over each row's group."""
        return self.mean((values.double() - self.mean(values)).square()).sqrt()

    def equal(self, values: Tensor) -> Tensor:
        """Return whether all ``values`` of each row's group are equal, bool ``[rows]``; NaN does not count."""
        groups = int(self.index.max()) + 1 if len(self.index) else 0
        low, high = (
            torch.full((groups,), none, dtype=values.dtype).scatter_reduce(
                0, self.index, values.nan_to_num(none), reduce
            )
            for reduce, none in (("amin", math.inf), ("amax", -math.inf))
        )
        return (low >= high)[self.index]


@dataclass(frozen=True)
class Outcomes:
    """The scores of a batch of responses.

    Attributes:
        scores: float64 ``[rows]``, the sum of the token scores of every response, without a KL penalty.
        penalty: float32 ``[rows, response]``, the sum of the KL penalty in the reward from every token on; None
            without a penalty.
        mask: bool ``[rows, response]``, the tokens of the response.
    """

    scores: Tensor
    penalty: Tensor | None
    mask: Tensor

    def on_tokens(self, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Return an advantage per response, ``[rows]``, on each of its tokens plus the penalty, twice: float32.

        Group statistics never contain the penalty. Differences of the KL inside a group of equal scores would be
        scaled up to noise as large as a real signal.
        """
        spread = advantages.float()[:, None] * self.mask
        if self.penalty is not None:
            spread += self.penalty
        return spread, spread


def outcomes(data: DataProto, gamma: float) -> Outcomes:
    """Return the scores of the responses of a batch.

    Args:
        data: ``token_level_rewards`` and ``response_mask`` ``[rows, response]``, and ``token_level_scores`` if a
            KL penalty is part of the rewards.
        gamma: discount factor per token of the penalty.

    Raises:
        DataError: a column is missing.
    """
    rewards, mask = columns(data, "token_level_rewards", "response_mask")
    scores = columns(data, "token_level_scores")[0] if "token_level_scores" in data.tensor_names else rewards
    penalty = None
    if scores is not rewards and not torch.equal(scores, rewards):
        later = packed_left(inside(rewards.float() - scores.float(), mask), mask)
        penalty = unpacked(discounted_sums(later, gamma), mask)
    return Outcomes(inside(scores, mask).sum(1, dtype=torch.float64), penalty, mask.bool())


def groups_of(data: DataProto) -> Groups:
    """Return the groups of rows with the same ``uid``.

    Raises:
        DataError: the batch has no non-tensor column ``uid``.
    """
    if "uid" not in data.non_tensor_batch:
        raise DataError("advantages relative to a group need the non-tensor column 'uid'", columns=["uid"])
    uids: Sequence[Hashable] = data.non_tensor_batch["uid"].tolist()
    number = {uid: index for index, uid in enumerate(dict.fromkeys(uids))}
    return Groups(torch.tensor([number[uid] for uid in uids], dtype=torch.long))
