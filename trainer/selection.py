"""Which responses are trained on: those with a score, dynamic sampling, and responses that are too long."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from mcontroller.data.batch import DataProto
from mcontroller.errors import DataError
from trainer.columns import columns, of_equal_width, response_lengths
from trainer.config import SCORE, FilterGroupsConfig, OverlongConfig
from trainer.estimators.built_in import groups_of
from trainer.metrics import Metrics
from trainer.rewards.reward import Reward, joined, outcome_scores


def trained_on(batch: DataProto, kept: Tensor) -> DataProto:
    """Return the batch with a ``response_mask`` of 0 in all rows but those that are kept.

    A row without response tokens is in no loss, no average and no baseline.

    Args:
        batch: responses with ``response_mask`` ``[rows, response]``.
        kept: bool ``[rows]``.
    """
    if bool(kept.all()):
        return batch
    (mask,) = columns(batch, "response_mask")
    return batch.with_tensors({"response_mask": mask * kept[:, None]})


class GroupFilter:
    """The responses of one step, collected from one or more batches of prompts.

    Args:
        config: whether to filter, by which values, and the most batches.
        prompts: groups of a step.
        pad_token_id: fills the batches of a program's own rollout loop, which differ in width. None: they do not.

    Attributes:
        metrics: of the generation of all batches.
    """

    def __init__(self, config: FilterGroupsConfig, prompts: int, pad_token_id: int | None = None) -> None:
        self.config = config
        self.prompts = prompts
        self.pad_token_id = pad_token_id
        self.metrics = Metrics()
        self.rewards: list[Reward] = []
        self._batches: list[DataProto] = []
        self._kept: list[Tensor] = []
        self._chosen: Sequence[int] = ()

    def add(self, batch: DataProto, reward: Reward) -> None:
        """Add the responses to a batch of prompts.

        Args:
            batch: rows with the non-tensor column ``uid``; the rows of a group are neighbors.
            reward: their reward.

        Raises:
            DataError: the reward has no column ``filter_groups.metric``.
        """
        self._batches.append(batch)
        self.rewards.append(reward)
        if self.config.enable:
            self._kept.append(~groups_of(batch).equal(self._values(reward)))

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
        self._chosen = chosen.tolist()
        size = rows // self.prompts
        with_signal = int(kept.sum()) // size
        metrics = {
            "dynamic_sampling/batches": float(len(self._batches)),
            "dynamic_sampling/prompts_drawn": float(len(kept) // size),
            "dynamic_sampling/prompts_filled": float(max(self.prompts - with_signal, 0)),
            "dynamic_sampling/prompts_dropped": float(max(with_signal - self.prompts, 0)),
        }
        batches = self._batches
        if self.pad_token_id is not None:
            batches = of_equal_width(batches, self.pad_token_id)
        return DataProto.concat(batches).select_idxs(chosen), metrics

    def without_signal(self) -> Tensor:
        """Return whether the responses to a prompt have equal scores, bool ``[prompts]``, of all that were drawn."""
        parts = []
        for batch, reward in zip(self._batches, self.rewards, strict=True):
            equal = groups_of(batch).equal(reward.row_scores())
            parts.append(equal[:: len(batch) // self.prompts])
        return torch.cat(parts)

    def reward(self) -> Reward:
        """Return the reward of all responses that were drawn, dropped ones included; its samples are ``batch``'s."""
        reward = self.rewards[0] if len(self.rewards) == 1 else joined(self.rewards)
        samples = [reward.samples[row] for row in self._chosen if reward.samples] or reward.samples
        return dataclasses.replace(reward, samples=samples)

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


def penalized(reward: Reward, response_mask: Tensor, config: OverlongConfig, limit: int) -> Reward:
    """Return the reward with the length penalty on the last token of every response, and as a column.

    With ``L`` the longest possible response and ``b`` the buffer, a response of ``l`` tokens loses
    ``penalty * clip((l - (L - b)) / b, 0, 1)`` (Yu et al., 2025, arXiv:2503.14476, equation 13). The tokens of an
    environment between the tokens of the policy count, because they take room too.

    Args:
        reward: the reward of a batch.
        response_mask: ``[rows, response]``, 1 for the tokens of the policy.
        config: penalty, and a buffer of at least 1.
        limit: [tokens] the longest possible response.
    """
    buffer = min(config.buffer, limit)
    beyond = response_lengths(response_mask) - (limit - buffer)
    penalty = -config.penalty * (beyond / buffer).clamp(0.0, 1.0)
    scores = reward.token_level_scores + outcome_scores(penalty, response_mask)
    columns_of_rows = {**reward.columns, "overlong_penalty": penalty.tolist()}
    return dataclasses.replace(reward, token_level_scores=scores, columns=columns_of_rows)


def truncated_rows(batch: DataProto, eos_token_ids: Collection[int]) -> Tensor:
    """Return which responses were cut off for lack of room or turns, bool ``[rows]``.

    Args:
        batch: ``truncated`` bool ``[rows]``, which ``Episodes`` return; without it, ``responses`` and
            ``response_mask`` ``[rows, response]``: a response without a stop token at its end was cut off.
        eos_token_ids: the stop tokens.
    """
    if "truncated" in batch.tensor_names:
        return columns(batch, "truncated")[0]
    responses, mask = columns(batch, "responses", "response_mask")
    last = responses.gather(1, (response_lengths(mask)[:, None] - 1).clamp(min=0)).squeeze(1)
    return ~torch.isin(last, torch.tensor(list(eos_token_ids), dtype=responses.dtype))
