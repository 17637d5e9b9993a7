"""Dynamic sampling: prompts whose responses with a score all have the same are replaced by further prompts.

Yu et al., 2025 (DAPO, arXiv:2503.14476, section 3.2). A group of equal scores has no gradient; without it, every
optimizer step has the same number of groups that have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcontroller.config.checks import check_at_least
from mcontroller.config.fields import strict_fields
from mcontroller.data.protocol import DataProto
from mcontroller.errors import DataError
from mcontroller.ppo.estimators.outcomes import groups_of
from mcontroller.ppo.rewards import Reward, joined

__all__ = ["FilterGroupsConfig", "GroupFilter"]

SCORE = "score"
"""The metric that stands for the scores to train on."""


@strict_fields
@dataclass(frozen=True, slots=True)
class FilterGroupsConfig:
    """Dynamic sampling: draw further prompts in place of those whose responses all have the same score."""

    enable: bool = False
    """Draw again."""
    metric: str = SCORE
    """Values that must differ in a group: score (with length penalties), or a column of the reward such as accuracy."""
    max_batches: int = 10
    """[batches] Most batches of prompts that one step generates. Groups of equal scores then fill the rest of it."""

    def __post_init__(self) -> None:
        check_at_least("algorithm.filter_groups.max_batches", self.max_batches, 1)


class GroupFilter:
    """The responses of one step, collected from one or more batches of prompts.

    Args:
        config: whether to filter, by which values, and the most batches.
        prompts: groups of a step.
    """

    def __init__(self, config: FilterGroupsConfig, prompts: int) -> None:
        self.config = config
        self.prompts = prompts
        self.rewards: list[Reward] = []
        self._batches: list[DataProto] = []
        self._kept: list[Tensor] = []

    def add(self, batch: DataProto, reward: Reward) -> None:
        """Add the responses to a batch of prompts.

        Args:
            batch: rows with the non-tensor column ``uid``; those of a group are neighbors.
            reward: their reward.

        Raises:
            DataError: the reward has no column ``filter_groups.metric``.
        """
        self._batches.append(batch)
        self.rewards.append(reward)
        self._kept.append(~groups_of(batch).equal(self._values(reward)) if self.config.enable else _all(batch))

    @property
    def is_complete(self) -> bool:
        """Whether there are enough groups, or as many batches as are allowed."""
        rows = sum(map(len, self._batches)) // len(self._batches)
        enough = sum(int(kept.sum()) for kept in self._kept) >= rows
        return not self.config.enable or enough or len(self._batches) == self.config.max_batches

    def batch(self) -> tuple[DataProto, dict[str, float]]:
        """Return the responses to ``prompts`` prompts, and how many were drawn, dropped and filled up.

        Groups with a signal come first, in the order in which they were drawn; groups without one fill the rest.
        """
        if not self.config.enable:
            return self._batches[0], {}
        rows = len(self._batches[0])
        kept = torch.cat(self._kept)
        chosen = torch.cat((kept.nonzero().flatten(), (~kept).nonzero().flatten()))[:rows]
        size = rows // self.prompts
        with_signal = int(kept.sum()) // size
        metrics = {
            "dynamic_sampling/batches": float(len(self._batches)),
            "dynamic_sampling/prompts_drawn": float(len(kept) // size),
            "dynamic_sampling/prompts_filled": float(max(self.prompts - with_signal, 0)),
            "dynamic_sampling/prompts_dropped": float(max(with_signal - self.prompts, 0)),
        }
        return DataProto.concat(self._batches).select_idxs(chosen), metrics

    def without_signal(self) -> Tensor:
        """Return whether the responses to a prompt have equal scores, bool ``[prompts]``, of all that were drawn."""
        parts = []
        for batch, reward in zip(self._batches, self.rewards, strict=True):
            equal = groups_of(batch).equal(reward.row_scores())
            parts.append(equal[:: len(batch) // self.prompts])
        return torch.cat(parts)

    def reward(self) -> Reward:
        """Return the reward of all responses that were drawn, dropped ones included."""
        return self.rewards[0] if len(self.rewards) == 1 else joined(self.rewards)

    def _values(self, reward: Reward) -> Tensor:
        if self.config.metric == SCORE:
            return reward.row_scores()
        values: Sequence[float] | None = reward.columns.get(self.config.metric)
        if values is None:
            raise DataError(
                f"algorithm.filter_groups.metric is {self.config.metric!r}; the reward has "
                f"{', '.join((SCORE, *reward.columns))}",
                key="algorithm.filter_groups.metric",
                value=self.config.metric,
            )
        return torch.where(reward.row_scores().isnan(), torch.nan, torch.as_tensor(values, dtype=torch.float64))


def _all(batch: DataProto) -> Tensor:
    return torch.ones(len(batch), dtype=torch.bool)
