"""The KL penalty in the reward: how far the policy went from the reference, and what that costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mcontroller.data.protocol import DataProto
from mcontroller.errors import ConfigError
from mcontroller.ppo.config import KLControlConfig
from mcontroller.ppo.data import columns

__all__ = [
    "KL_CONTROLLERS",
    "KL_ESTIMATORS",
    "AdaptiveKLController",
    "FixedKLController",
    "KLController",
    "apply_kl_penalty",
    "estimate_kl",
    "make_kl_controller",
]


def _k3(log_ratio: Tensor) -> Tensor:
    back = (-log_ratio).clamp(-20.0, 20.0)  # a token that one of the two all but excludes must not become infinite
    return torch.expm1(back) - back


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": _k3,
    "abs": torch.abs,
}
"""Estimates of KL(policy || reference) for a token that the policy sampled, of ``log policy - log reference``.

k1 is unbiased; k2 is biased with less variance; k3 is unbiased and never negative (Schulman, "Approximating KL
divergence", 2020).
"""


def estimate_kl(log_probs: Tensor, ref_log_probs: Tensor, kl_penalty: str = "k1") -> Tensor:
    """Per token, the estimate of this name. Raises ConfigError listing those that exist."""
    if kl_penalty not in KL_ESTIMATORS:
        raise ConfigError(
            f"KL estimator {kl_penalty!r} does not exist: it is one of {', '.join(KL_ESTIMATORS)}",
            key="kl_penalty",
            value=kl_penalty,
        )
    return KL_ESTIMATORS[kl_penalty](log_probs - ref_log_probs)


class KLController(Protocol):
    """``value`` is the weight of the penalty; ``update`` tells it what the last batch's KL per token was."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None: ...


class FixedKLController:
    """A weight that stays."""

    def __init__(self, config: KLControlConfig) -> None:
        self.value = config.kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing changes."""


class AdaptiveKLController:
    """A weight that rises while the KL is above ``target_kl`` and falls while it is below.

    ``value *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon`` after ``n`` samples (Ziegler et al., 2019,
    arXiv:1909.08593, section 2.2).
    """

    def __init__(self, config: KLControlConfig) -> None:
        self.value = config.kl_coef
        self.target = config.target_kl
        self.horizon = config.horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapts the weight to the KL per token of ``n_steps`` new samples."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon


KL_CONTROLLERS: dict[str, Callable[[KLControlConfig], KLController]] = {
    "fixed": FixedKLController,
    "adaptive": AdaptiveKLController,
}


def make_kl_controller(config: KLControlConfig) -> KLController:
    """The controller that ``config.type`` names. Raises ConfigError listing those that exist."""
    if config.type not in KL_CONTROLLERS:
        raise ConfigError(
            f"KL controller {config.type!r} does not exist: it is one of {', '.join(KL_CONTROLLERS)}",
            key="algorithm.kl_ctrl.type",
            value=config.type,
        )
    return KL_CONTROLLERS[config.type](config)


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty: str = "k1"
) -> tuple[DataProto, dict[str, float]]:
    """The batch with ``token_level_rewards`` = scores - weight * KL, and the mean KL per token as a metric.

    Args:
        data: ``token_level_scores``, ``old_log_probs``, ``ref_log_prob``, ``response_mask`` ``[rows, response]``.
        kl_ctrl: gives the weight, and is told this batch's KL afterwards.
    """
    names = ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask")
    scores, log_probs, reference, mask = columns(data, *names)
    estimate = estimate_kl(log_probs, reference, kl_penalty)
    weight = kl_ctrl.value
    rewards = scores - weight * estimate * mask
    mean = float((estimate * mask).sum() / mask.sum().clamp(min=1))
    kl_ctrl.update(mean, n_steps=len(data))
    metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": weight}
    return data.union(DataProto.from_dict({"token_level_rewards": rewards})), metrics
