"""Controllers of the weight of the KL penalty, and their configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mcontroller.config.checks import check_above, check_at_least
from mcontroller.config.fields import strict_fields
from mcontroller.config.registry import Registry

__all__ = [
    "KL_CONTROLLERS",
    "AdaptiveKLController",
    "FixedKLController",
    "KLControlConfig",
    "KLController",
    "make_kl_controller",
]


class KLController(Protocol):
    """The weight of the KL penalty, updated after every batch."""

    value: float
    """The weight."""

    def update(self, current_kl: float, n_steps: int) -> None:
        """Update the weight with the mean KL per token of the last batch, which has ``n_steps`` samples."""

    def resume(self, value: float) -> None:
        """Continue from the weight of a saved run."""


KL_CONTROLLERS: Registry[Callable[[KLControlConfig], KLController]] = Registry(
    "KL controller", key="algorithm.kl_ctrl.type"
)
"""Controllers by the name that ``algorithm.kl_ctrl.type`` takes; ``KL_CONTROLLERS.register`` adds one."""


@strict_fields
@dataclass(frozen=True, slots=True)
class KLControlConfig:
    """The weight of the KL penalty in the reward."""

    type: str = "fixed"
    """Name of the controller: fixed, or adaptive towards target_kl."""
    kl_coef: float = 0.001
    """Weight at the start."""
    target_kl: float = 0.1
    """[nats per token] KL that an adaptive controller steers towards."""
    horizon: int = 10000
    """[samples] Samples after which an adaptive weight has changed by a factor of at most about 1.2."""

    def __post_init__(self) -> None:
        KL_CONTROLLERS.get_or_raise(self.type)
        check_at_least("algorithm.kl_ctrl.kl_coef", self.kl_coef, 0.0)
        check_at_least("algorithm.kl_ctrl.horizon", self.horizon, 1)
        if self.type == "adaptive":
            check_above("algorithm.kl_ctrl.target_kl", self.target_kl, 0.0)


@KL_CONTROLLERS.register("fixed")
class FixedKLController:
    """A constant weight."""

    def __init__(self, config: KLControlConfig) -> None:
        self.value = config.kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Keep the weight."""

    def resume(self, value: float) -> None:
        """Keep the configured weight, which may differ from the saved one."""


@KL_CONTROLLERS.register("adaptive")
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
        """Adapt the weight to the KL per token of ``n_steps`` new samples."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon

    def resume(self, value: float) -> None:
        """Continue from the weight of a saved run."""
        self.value = value


def make_kl_controller(config: KLControlConfig) -> KLController:
    """Return the controller that ``config.type`` names."""
    return KL_CONTROLLERS[config.type](config)
