"""Reward functions, which score finished responses: the interface between the trainer and a task."""

from __future__ import annotations

import math
import numbers
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError
from mcontroller.transport import complete
from trainer.columns import EPISODE_SCORES, FAILED, columns, response_lengths, without
from trainer.metrics import name_conflict
from workers.columns import ROUTED_EXPERTS

_NUMBER = (numbers.Real, np.bool_, Tensor)
CombineRewards = Callable[[Tensor, Tensor], Tensor]
"""Maps the scores of the reward function and of the reward model to the scores to train on.

All three are float32 ``[rows, response]``. A row without a score of the reward function has none afterwards either.
"""


@dataclass(frozen=True)
class Reward:
    """Scores of responses.

    Attributes:
        token_level_scores: float32 ``[rows, response]``; ``outcome_scores`` makes it from one score per response.
        columns: other values of every row, such as its ``accuracy``; their means and standard deviations are
            reported. NaN: the value does not apply to the row.
        samples: what people look at: a mapping for each row with its ``prompt``, ``response`` and other texts and
            numbers; empty if the function does not decode.
        answers: the answer of every row, such as the number that was extracted from it. Validation with several
            responses takes a majority vote over equal answers.
        scored: whether each row has a score; None: all have one. A row without a score is not trained on, and leaves
            the baseline of its group. Its token scores are 0.
    """

    token_level_scores: Tensor
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    answers: Sequence[Hashable] | None = None
    scored: Sequence[bool] | None = None

    def row_scores(self) -> Tensor:
        """Return the sum of the token scores of every row, ``[rows]``; NaN for rows without a score."""
        sums = self.token_level_scores.sum(1)
        return sums if self.scored is None else torch.where(torch.tensor(self.scored, dtype=torch.bool), sums, math.nan)


Scores = Reward | Tensor | Sequence[float | None]
"""What a reward function may return.

A Reward; its ``token_level_scores`` ``[rows, response]`` alone; or one score per response, as a tensor ``[rows]`` or a
sequence, in which None is no score: the reward does not apply to the row, which is not trained on.
"""


class RewardFunction(Protocol):
    """A function from a batch to its scores. It may be async.

    The tensor columns of responses are on the workers: ``batch.tensors(names)`` fetches some of them, and
    ``batch.batch`` all. A function with an attribute ``reads``, the names of those that it reads, gets only these.
    """

    def __call__(self, batch: DataProto) -> Scores | Awaitable[Scores]:
        """Return the scores of a batch.

        Args:
            batch: the result of ``generate_sequences``, the non-tensor columns of the data set, and ``rm_scores``
                ``[rows, response]`` if there is a reward model.
        """


@runtime_checkable
class StartableReward(Protocol):
    """A reward function that can score a batch while the groups work on it."""

    def start(self, batch: DataProto) -> Callable[[], Scores]:
        """Start to score a batch, without ``rm_scores``; return a function that waits for its scores."""


def weighted_sum(rule: float = 1.0, model: float = 1.0) -> CombineRewards:
    """Return a function that adds the scores of the reward function and of the reward model with these weights."""
    return lambda rule_scores, model_scores: rule * rule_scores + model * model_scores


def rule_only(rule_scores: Tensor, model_scores: Tensor) -> Tensor:
    """Return the scores of the reward function, for one that reads ``rm_scores`` itself."""
    return rule_scores


def outcome_scores(scores: Sequence[float] | Tensor, response_mask: Tensor) -> Tensor:
    """Return one score per response, ``[rows]``, on its last token: float32 ``[rows, response]``.

    A response without tokens has a score of 0.

    Raises:
        DataError: there are not as many scores as responses.
    """
    values = torch.as_tensor(scores, dtype=torch.float32)
    if values.shape != (len(response_mask),):
        given, rows = list(values.shape), len(response_mask)
        raise DataError(f"scores are {given}; expected one for each of the {rows} responses, [{rows}]", column="scores")
    last = (response_lengths(response_mask) - 1).clamp(min=0)
    on_tokens = torch.zeros(response_mask.shape, dtype=torch.float32)
    on_tokens.scatter_(1, last.unsqueeze(1), values.unsqueeze(1))
    return on_tokens.mul_(response_mask != 0)


def joined(rewards: Sequence[Reward]) -> Reward:
    """Return one Reward of the rows of several, with one score per row, ``[rows, 1]``: responses differ in width."""
    scores = torch.cat([reward.token_level_scores.sum(1, keepdim=True) for reward in rewards])
    names = dict.fromkeys(name for reward in rewards for name in reward.columns)
    absent = [[math.nan] * len(reward.token_level_scores) for reward in rewards]
    parts = list(zip(rewards, absent, strict=True))
    columns = {name: [value for one, nan in parts for value in one.columns.get(name, nan)] for name in names}
    samples: list[Mapping[str, Any]] = []
    if all(len(reward.samples) for reward in rewards):
        samples = [sample for reward in rewards for sample in reward.samples]
    answers = None
    if all(reward.answers is not None for reward in rewards):
        answers = [answer for reward in rewards for answer in reward.answers or ()]
    scored = [not missing for reward in rewards for missing in reward.row_scores().isnan().tolist()]
    return Reward(scores, columns, samples, answers, scored)


class RewardSources:
    """The scores of responses: those of their episodes and of a reward function, added, and of a reward model.

    Args:
        reward_fn: the reward of responses to train on.
        val_reward_fn: the reward of responses to held-out problems; None: ``reward_fn``.
        has_model: whether there is a reward model.
        combine: makes one score of both; None: ``weighted_sum()``, for the scores of episodes.
        has_episodes: whether episodes make the responses, which may have scores.

    Raises:
        ConfigError: there is no reward, or there are both and no function that combines them.
    """

    def __init__(
        self,
        reward_fn: RewardFunction | None,
        val_reward_fn: RewardFunction | None,
        has_model: bool,
        combine: CombineRewards | None,
        has_episodes: bool = False,
    ) -> None:
        if reward_fn is None and not (has_model or has_episodes):
            raise ConfigError("there is no reward: pass reward_fn, or map Role.RewardModel", key="reward_fn")
        if reward_fn is not None and has_model and combine is None:
            raise ConfigError(
                "there are scores of reward_fn and of Role.RewardModel: pass combine_rewards, such as "
                "weighted_sum(rule=1.0, model=1.0), or rule_only if reward_fn reads rm_scores itself; or pass "
                "reward_fn=None to use the reward model alone",
                key="combine_rewards",
            )
        self.training = reward_fn
        self.held_out = val_reward_fn or reward_fn
        self.combine = combine or weighted_sum()

    def start(self, batch: DataProto, problems: DataProto) -> Callable[[], Scores] | None:
        """Start to score a batch of responses to train on, if the reward function can; return what ``score`` waits for.

        Args:
            batch: responses.
            problems: the other columns of their problems.
        """
        if isinstance(self.training, StartableReward):
            return self.training.start(self.visible(batch).union(problems))
        return None

    def visible(self, batch: DataProto, *, held_out: bool = False) -> DataProto:
        """Return a batch of responses with the tensors that the reward function reads.

        A function that does not name any gets all but the experts of tokens, the largest column.
        """
        function = self.held_out if held_out else self.training
        reads = ("response_mask",) if function is None else getattr(function, "reads", None)
        if reads is None:
            return without(batch, [ROUTED_EXPERTS])
        reads = (*reads, "response_mask", EPISODE_SCORES, FAILED)
        return batch.select([name for name in batch.tensor_names if name in reads]).prefetch()

    def score(self, batch: DataProto, *, held_out: bool = False, started: Callable[[], Scores] | None = None) -> Reward:
        """Call the reward function, and return the Reward of a batch.

        Args:
            batch: responses with the columns of their problems, and ``rm_scores`` if there is a reward model.
            held_out: whether the problems are held out.
            started: what ``start`` returned for the batch.

        Raises:
            DataError: a function returned values that do not fit the responses.
        """
        model = columns(batch, "rm_scores")[0] if "rm_scores" in batch.tensor_names else None
        function = self.held_out if held_out else self.training
        rule = None
        if function is not None:
            rule = rewarded(function if started is None else lambda batch: started(), batch)
        if EPISODE_SCORES in batch.tensor_names:
            rule = _with_episode_scores(rule, batch)
        if rule is None and model is not None:
            return rewarded(lambda batch: Reward(model), batch, "the reward model")
        if rule is None:
            raise DataError(
                "no response has a score: there is no reward function, and no episode has set score of the Trajectory "
                "that it returned, nor an agent returned one. Set it, or add a function to rewards.functions",
                rows=len(batch),
            )
        if model is None:
            return rule
        parts = {"rule_score": rule.token_level_scores, "model_score": model}
        sums = {name: scores.sum(1).tolist() for name, scores in parts.items()}
        combined = self.combine(rule.token_level_scores, model)
        whole = Reward(combined, {**rule.columns, **sums}, rule.samples, rule.answers, rule.scored)
        return rewarded(lambda batch: whole, batch, "combine_rewards")


def rewarded(reward_fn: RewardFunction, batch: DataProto, name: str = "the reward function") -> Reward:
    """Return the Reward of a batch.

    Args:
        reward_fn: the function.
        batch: the batch that it scores, with ``response_mask`` ``[rows, response]``.
        name: of the function, for error messages.

    Raises:
        DataError: the function returned values that do not fit the responses.
    """
    (mask,) = columns(batch, "response_mask")
    reward = _as_reward(complete(reward_fn(batch)), mask, name)
    try:
        on_tokens = torch.as_tensor(reward.token_level_scores, dtype=torch.float32, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"{name} returned {_shown(reward.token_level_scores)} as token_level_scores; expected a tensor: {error}"
        raise DataError(text, value=reward.token_level_scores) from error
    reward, expected = replace(reward, token_level_scores=on_tokens), tuple(mask.shape)
    if tuple(reward.token_level_scores.shape) != expected:
        raise DataError(
            f"{name} returned token_level_scores of shape {tuple(reward.token_level_scores.shape)}; expected "
            f"{expected}, the shape of response_mask, or {expected[:1]}, one score per response",
            shape=tuple(reward.token_level_scores.shape),
            expected=expected,
        )
    finite = torch.isfinite(reward.token_level_scores).all(1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise DataError(
            f"{name} returned a score of {float(reward.token_level_scores[row].sum())} for response {row}; expected "
            "finite numbers, or None for a response that it does not apply to",
            row=row,
        )
    outside = ((reward.token_level_scores != 0) & ~mask.bool()).nonzero()
    if len(outside):
        row, token = outside[0].tolist()
        raise DataError(
            f"{name} returned a score of {float(reward.token_level_scores[row, token])} on token {token} of response "
            f"{row}, whose response_mask is 0 there: padding, or a token that is not the policy's. Put the "
            "score on a token of the policy, such as the last one; trainer.outcome_scores does",
            row=row,
            token=token,
        )
    if conflict := name_conflict(reward.columns):
        column, owner = conflict
        raise DataError(
            f"{name} returned the column {column!r}, whose metric train/{column} is that of {owner}: give it another "
            "name",
            column=column,
        )
    for column, values in reward.columns.items():
        _check_values(values, expected[0], name, column, _NUMBER, "a number, NaN if it does not apply")
    if reward.scored is not None:
        _check_values(reward.scored, expected[0], name, "scored", _NUMBER, "a truth value")
    if reward.answers is not None:
        _check_values(
            reward.answers, expected[0], name, "answers", Hashable, "a value that can be hashed, such as text"
        )
    if len(reward.samples):
        _check_values(reward.samples, expected[0], name, "samples", Mapping, "a mapping")
    return reward


def _check_values(values: Any, rows: int, function: str, column: str, kind: Any, expected: str) -> None:
    """Raise DataError unless there is a value of a kind for each response."""
    length = len(values) if isinstance(values, Sized) else None
    if length != rows:
        given = _shown(values) if length is None else f"{length} values"
        text = f"{function} returned {given} of {column!r} for {rows} responses"
        raise DataError(text, column=column, length=length, expected=rows)
    for row, value in enumerate(values):
        if not isinstance(value, kind):
            text = f"{function} returned {_shown(value)} as {column!r} of response {row}; expected {expected}"
            raise DataError(text, column=column, row=row, value=value)


def _with_episode_scores(rule: Reward | None, batch: DataProto) -> Reward | None:
    """Return the reward with the scores of episodes added, which a row without one does not change."""
    scores, mask = columns(batch, EPISODE_SCORES, "response_mask")
    given = ~scores.isnan()
    all_failed = FAILED in batch.tensor_names and bool(columns(batch, FAILED)[0].all())
    if not given.any() and not (rule is None and all_failed):
        return rule
    on_tokens = outcome_scores(scores.nan_to_num(), mask)
    if rule is None:
        return Reward(on_tokens, scored=given.tolist())
    scored = given | ~rule.row_scores().isnan()
    both = {**rule.columns, "episode_score": scores.tolist()}
    return replace(rule, token_level_scores=rule.token_level_scores + on_tokens, columns=both, scored=scored.tolist())


def _as_reward(result: Any, mask: Tensor, name: str) -> Reward:
    if isinstance(result, Reward):
        return result
    if isinstance(result, Tensor) and result.dim() != 1:
        return Reward(result)
    if not isinstance(result, Tensor | Sequence | np.ndarray) or isinstance(result, str | bytes):
        raise DataError(
            f"{name} returned {_shown(result)}; expected a Reward, token_level_scores [rows, response], or one score "
            "per response",
            value=result,
        )
    scores = result.tolist() if isinstance(result, Tensor | np.ndarray) else list(result)
    if len(scores) != len(mask):
        raise DataError(
            f"{name} returned {len(scores)} scores for {len(mask)} responses", length=len(scores), expected=len(mask)
        )
    for row, score in enumerate(scores):
        if score is not None and (not _is_number(score)):
            raise DataError(
                f"{name} returned {_shown(score)} for response {row}; expected a number or None", row=row, value=score
            )
    on_tokens = outcome_scores([0.0 if score is None else float(score) for score in scores], mask)
    return Reward(on_tokens, scored=[score is not None for score in scores] if None in scores else None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} of type {type(value).__name__}"
