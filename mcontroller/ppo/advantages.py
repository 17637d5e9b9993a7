"""Advantage estimators by name.

Register a custom one before the configuration is made, and choose it with ``algorithm.adv_estimator=mine``. Estimators
run in the controller's process, so a registration in the program's main file is enough::

    @register_advantage_estimator("mine")
    def mine(data, *, gamma, lam):
        (rewards,) = columns(data, "token_level_rewards")
        return rewards, rewards
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mcontroller.config.registry import Registry
from mcontroller.data.protocol import DataProto
from mcontroller.errors import DataError
from mcontroller.ppo.data import columns

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "AdvantageFunction",
    "compute_advantage",
    "compute_gae",
    "register_advantage_estimator",
]


class AdvantageFunction(Protocol):
    """The function of an advantage estimator."""

    def __call__(self, data: DataProto, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
        """Return advantages and returns, both float32 ``[rows, response]``, 0 for tokens with a mask of 0.

        Args:
            data: a scored batch with ``token_level_rewards`` and ``response_mask`` ``[rows, response]``.
            gamma: discount factor per token.
            lam: lambda of generalized advantage estimation.
        """


@dataclass(frozen=True)
class AdvantageEstimator:
    """An advantage estimator.

    Attributes:
        estimate: its function.
        needs_critic: whether it reads ``values``. Without it no critic is started.
    """

    estimate: AdvantageFunction
    needs_critic: bool


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator", key="algorithm.adv_estimator")
"""Advantage estimators by the name that ``algorithm.adv_estimator`` takes."""

F = TypeVar("F", bound=AdvantageFunction)


def register_advantage_estimator(name: str, *, needs_critic: bool = False) -> Callable[[F], F]:
    """Return a decorator that registers an advantage estimator under ``name``.

    Args:
        name: the value of ``algorithm.adv_estimator`` that chooses it.
        needs_critic: whether it reads the critic's ``values``.

    Raises:
        ConfigError: another advantage estimator is registered under this name.
    """

    def add(estimate: F) -> F:
        ADVANTAGE_ESTIMATORS.add(name, AdvantageEstimator(estimate, needs_critic))
        return estimate

    return add


def compute_advantage(
    data: DataProto,
    adv_estimator: str = "gae",
    gamma: float = 1.0,
    lam: float = 1.0,
    normalize: bool = True,
) -> DataProto:
    """Return the batch with columns ``advantages`` and ``returns``, float32 ``[rows, response]``.

    Args:
        data: ``token_level_rewards`` and ``response_mask`` ``[rows, response]``, and the columns that the estimator
            reads: ``values`` for gae, the non-tensor column ``uid`` for grpo and rloo.
        adv_estimator: a name in ``ADVANTAGE_ESTIMATORS``.
        gamma: discount factor per token.
        lam: lambda of generalized advantage estimation.
        normalize: scale advantages to mean 0 and variance 1 over all response tokens of the batch.

    Raises:
        ConfigError: no estimator has this name.
        DataError: a column is missing.
    """
    estimator = ADVANTAGE_ESTIMATORS.get_or_raise(adv_estimator)
    advantages, returns = estimator.estimate(data, gamma=gamma, lam=lam)
    if normalize:
        advantages = whiten(advantages, *columns(data, "response_mask"))
    return data.union(DataProto.from_dict({"advantages": advantages, "returns": returns}))


def compute_gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of generalized advantage estimation, ``[rows, response]``.

    ``A_t = sum_l (gamma * lam)^l * (r_{t+l} + gamma * V_{t+l+1} - V_{t+l})`` over the tokens of the response, with a
    value of 0 after the last one; ``returns = A + V`` (Schulman et al., 2015, arXiv:1506.02438, equation 16). Tokens
    with a mask of 0, at the end or in between (a tool's output), are skipped: their rewards and values do not count.

    Args:
        token_level_rewards: ``[rows, response]``.
        values: ``[rows, response]``, of the critic.
        response_mask: ``[rows, response]``, 1 for the tokens of the response.
        gamma: discount factor per token.
        lam: weight of later errors; 0 is one-step, 1 is Monte Carlo.
    """
    mask = response_mask.bool()
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(values.size(1))):
        is_step = mask[:, t]
        error = token_level_rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = torch.where(is_step, error + gamma * lam * next_advantage, 0.0)
        next_advantage = torch.where(is_step, advantages[:, t], next_advantage)
        next_value = torch.where(is_step, values[:, t], next_value)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return values scaled to mean 0 and variance 1 over the entries with a mask of 1, and 0 for the others."""
    mask = mask.to(values.dtype)
    count = mask.sum().clamp(min=1)
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / count
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


@register_advantage_estimator("gae", needs_critic=True)
def gae(data: DataProto, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return ``compute_gae`` with the critic's ``values``."""
    rewards, values, mask = columns(data, "token_level_rewards", "values", "response_mask")
    return compute_gae(rewards, values, mask, gamma, lam)


@register_advantage_estimator("grpo")
def grpo(data: DataProto, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return ``(R - mean) / std`` on each token, over the responses to the same problem (the same ``uid``).

    A single response has an advantage of 0 (Shao et al., 2024, arXiv:2402.03300, section 4.1.2).
    """
    rewards, mask = columns(data, "token_level_rewards", "response_mask")
    totals, group = (rewards * mask).sum(1), _groups(data)
    mean = _group_mean(totals, group)[group]
    deviation = _group_mean((totals - mean).square(), group)[group].sqrt()
    advantages = ((totals - mean) / (deviation + 1e-6)).unsqueeze(1) * mask
    return advantages, advantages


@register_advantage_estimator("rloo")
def rloo(data: DataProto, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return the reward minus the mean of the other responses to the same problem (``uid``), on each token.

    A single response has an advantage of 0 (Ahmadian et al., 2024, arXiv:2402.14740, equation 8).
    """
    rewards, mask = columns(data, "token_level_rewards", "response_mask")
    totals, group = (rewards * mask).sum(1), _groups(data)
    size = torch.bincount(group)[group]
    others = size / (size - 1).clamp(min=1)
    advantages = ((totals - _group_mean(totals, group)[group]) * others).unsqueeze(1) * mask
    return advantages, advantages


def _groups(data: DataProto) -> Tensor:
    """Return the index of every row's problem: 0, 1, ... in the order of the first occurrence of its uid."""
    if "uid" not in data.non_tensor_batch:
        raise DataError("advantages relative to a group need the non-tensor column 'uid'", columns=["uid"])
    uids: Sequence[Hashable] = data.non_tensor_batch["uid"].tolist()
    number = {uid: index for index, uid in enumerate(dict.fromkeys(uids))}
    return torch.tensor([number[uid] for uid in uids], dtype=torch.long)


def _group_mean(values: Tensor, group: Tensor) -> Tensor:
    sizes = torch.bincount(group)
    return torch.zeros(len(sizes), dtype=values.dtype).index_add(0, group, values) / sizes
