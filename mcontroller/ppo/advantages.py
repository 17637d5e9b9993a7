"""How much better than expected every token was: advantage estimators, by name.

An estimator takes a scored batch and gives ``(advantages, returns)``, both float32 ``[rows, response]`` and 0 where
``response_mask`` is 0. ``register_advantage_estimator("mine")`` above a function of one's own makes
``algorithm.adv_estimator=mine`` possible.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mcontroller.data.protocol import DataProto
from mcontroller.errors import ConfigError, DataError
from mcontroller.ppo.data import columns

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "compute_advantage",
    "compute_gae",
    "register_advantage_estimator",
]


class Estimate(Protocol):
    """The function behind an estimator."""

    def __call__(self, data: DataProto, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class AdvantageEstimator:
    """An estimator and what it reads: without ``needs_critic`` no critic is started."""

    estimate: Estimate
    needs_critic: bool


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {}
E_ = TypeVar("E_", bound=Estimate)


def register_advantage_estimator(name: str, *, needs_critic: bool = False) -> Callable[[E_], E_]:
    """Puts the decorated function under ``name``. Raises ConfigError where the name is taken by another."""

    def put(estimate: E_) -> E_:
        if name in ADVANTAGE_ESTIMATORS and ADVANTAGE_ESTIMATORS[name].estimate is not estimate:
            raise ConfigError(f"there is an advantage estimator {name!r} already: take another name", key=name)
        ADVANTAGE_ESTIMATORS[name] = AdvantageEstimator(estimate, needs_critic)
        return estimate

    return put


def advantage_estimator(name: str) -> AdvantageEstimator:
    """The estimator of this name. Raises ConfigError listing those that exist."""
    if name not in ADVANTAGE_ESTIMATORS:
        raise ConfigError(
            f"advantage estimator {name!r} does not exist: it is one of {', '.join(ADVANTAGE_ESTIMATORS)}",
            key="algorithm.adv_estimator",
            value=name,
        )
    return ADVANTAGE_ESTIMATORS[name]


def compute_advantage(
    data: DataProto,
    adv_estimator: str = "gae",
    gamma: float = 1.0,
    lam: float = 1.0,
    normalize: bool = True,
) -> DataProto:
    """The batch with columns ``advantages`` and ``returns``, float32 ``[rows, response]``.

    Args:
        data: ``token_level_rewards`` and ``response_mask`` ``[rows, response]``, and what the estimator reads beside.
        normalize: bring advantages to mean 0 and variance 1 over all response tokens of the batch.

    Raises:
        ConfigError: no estimator of this name.
        DataError: a column is missing.
    """
    advantages, returns = advantage_estimator(adv_estimator).estimate(data, gamma=gamma, lam=lam)
    if normalize:
        advantages = whiten(advantages, *columns(data, "response_mask"))
    return data.union(DataProto.from_dict({"advantages": advantages, "returns": returns}))


def compute_gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: advantages and returns, ``[rows, response]``.

    ``A_t = sum_l (gamma * lam)^l * (r_{t+l} + gamma * V_{t+l+1} - V_{t+l})`` over the response's tokens, with a value
    of 0 after the last one; ``returns = A + V``. Tokens with a mask of 0, at the end or in between (what a tool said),
    are no steps: neither their reward nor their value enters (Schulman et al., 2015, arXiv:1506.02438, equation 16).
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
    """Values brought to mean 0 and variance 1 over the entries with a mask of 1; 0 elsewhere."""
    mask = mask.to(values.dtype)
    count = mask.sum().clamp(min=1)
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / count
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


@register_advantage_estimator("gae", needs_critic=True)
def gae(data: DataProto, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """``compute_gae`` with the critic's ``values``."""
    rewards, values, mask = columns(data, "token_level_rewards", "values", "response_mask")
    return compute_gae(rewards, values, mask, gamma, lam)


@register_advantage_estimator("grpo")
def grpo(data: DataProto, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """A response's reward beside those of the same problem: ``(R - mean) / std`` on each of its tokens.

    The problem of a row is its ``uid``, a non-tensor column; one response alone has an advantage of 0 (Shao et al.,
    2024, arXiv:2402.03300, section 4.1.2).
    """
    rewards, mask = columns(data, "token_level_rewards", "response_mask")
    totals, group = (rewards * mask).sum(1), _groups(data)
    mean = _group_mean(totals, group)[group]
    deviation = _group_mean((totals - mean).square(), group)[group].sqrt()
    advantages = ((totals - mean) / (deviation + 1e-6)).unsqueeze(1) * mask
    return advantages, advantages


@register_advantage_estimator("rloo")
def rloo(data: DataProto, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """A response's reward less the mean of the others of the same problem (``uid``), on each of its tokens.

    One response alone has an advantage of 0 (Ahmadian et al., 2024, arXiv:2402.14740, equation 8).
    """
    rewards, mask = columns(data, "token_level_rewards", "response_mask")
    totals, group = (rewards * mask).sum(1), _groups(data)
    size = torch.bincount(group)[group]
    others = size / (size - 1).clamp(min=1)
    advantages = ((totals - _group_mean(totals, group)[group]) * others).unsqueeze(1) * mask
    return advantages, advantages


def _groups(data: DataProto) -> Tensor:
    """For every row, the number of its problem: 0, 1, ... in the order in which their uids first stand."""
    if "uid" not in data.non_tensor_batch:
        raise DataError("advantages relative to a group need the non-tensor column 'uid'", columns=["uid"])
    uids: Sequence[Hashable] = data.non_tensor_batch["uid"].tolist()
    number = {uid: index for index, uid in enumerate(dict.fromkeys(uids))}
    return torch.tensor([number[uid] for uid in uids], dtype=torch.long)


def _group_mean(values: Tensor, group: Tensor) -> Tensor:
    sizes = torch.bincount(group)
    return torch.zeros(len(sizes), dtype=values.dtype).index_add(0, group, values) / sizes
