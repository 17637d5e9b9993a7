"""How the controller program is configured; the workers' own configurations are handed to them as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcontroller.errors import ConfigError

__all__ = ["AlgorithmConfig", "DataConfig", "KLControlConfig", "PPOConfig", "TrainerConfig", "WarmUpConfig"]


@dataclass(frozen=True, slots=True)
class KLControlConfig:
    """The weight of the KL penalty in the reward: ``fixed``, or ``adaptive`` towards ``target_kl`` per token.

    ``horizon`` is in samples: over about so many the adaptive weight changes by a factor of 1.2 at most.
    """

    type: str = "fixed"
    kl_coef: float = 0.001
    target_kl: float = 0.1
    horizon: int = 10000

    def __post_init__(self) -> None:
        _at_least("algorithm.kl_ctrl.kl_coef", self.kl_coef, 0.0)
        _at_least("algorithm.kl_ctrl.horizon", self.horizon, 1)
        if self.type == "adaptive" and not self.target_kl > 0:
            _refuse("algorithm.kl_ctrl.target_kl", self.target_kl, "must be more than 0 for an adaptive controller")


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """What happens between rewards and advantages.

    ``adv_estimator`` is a name in ``ADVANTAGE_ESTIMATORS``, ``kl_penalty`` one in ``KL_ESTIMATORS``. Advantages are
    brought to mean 0 and variance 1 over the batch's response tokens under ``normalize_advantages``.
    """

    adv_estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    normalize_advantages: bool = True
    use_kl_in_reward: bool = True
    kl_penalty: str = "k1"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                _refuse(f"algorithm.{name}", getattr(self, name), "must lie between 0 and 1")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """How many problems go into a step; ``seed`` decides their order. ``val_batch_size`` 0 is all held-out at once."""

    train_batch_size: int = 256
    val_batch_size: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("data.train_batch_size", self.train_batch_size, 1)
        _at_least("data.val_batch_size", self.val_batch_size, 0)


@dataclass(frozen=True, slots=True)
class WarmUpConfig:
    """A supervised phase before PPO: ``steps`` optimizer steps on ``batch_size`` demonstrations each."""

    steps: int = 0
    batch_size: int = 256

    def __post_init__(self) -> None:
        _at_least("warm_up.steps", self.steps, 0)
        _at_least("warm_up.batch_size", self.batch_size, 1)


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """The run: how long it is, and when it is measured and saved.

    The policy stays as it is for the first ``critic_warmup`` steps while the critic learns. Held-out problems are
    decoded every ``test_freq`` steps and after the last one, checkpoints are written every ``save_freq`` steps and
    after the last one, into ``default_local_dir``; 0 is only after the last, -1 never. ``val_before_train`` decodes
    the held-out problems before the first step as well. ``max_to_keep`` is how many checkpoints stay (None: all).
    ``resume`` goes on from the last checkpoint.
    """

    total_training_steps: int = 100
    critic_warmup: int = 0
    val_before_train: bool = True
    test_freq: int = 0
    save_freq: int = 0
    max_to_keep: int | None = None
    default_local_dir: str = "checkpoints"
    resume: bool = False

    def __post_init__(self) -> None:
        _at_least("trainer.total_training_steps", self.total_training_steps, 0)
        _at_least("trainer.critic_warmup", self.critic_warmup, 0)
        _at_least("trainer.test_freq", self.test_freq, -1)
        _at_least("trainer.save_freq", self.save_freq, -1)
        if self.max_to_keep is not None:
            _at_least("trainer.max_to_keep", self.max_to_keep, 1)


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """Everything that ``RayPPOTrainer`` reads. A program of one's own derives from it to type the workers' parts.

    ``actor_rollout_ref``, ``critic``, ``ref`` and ``reward_model`` are the ``config`` of the workers in these roles;
    ``ref`` and ``reward_model`` only where those roles have groups of their own.
    """

    actor_rollout_ref: Any
    critic: Any = None
    ref: Any = None
    reward_model: Any = None
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    warm_up: WarmUpConfig = field(default_factory=WarmUpConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


def _at_least(key: str, value: float, least: float) -> None:
    if not value >= least:
        _refuse(key, value, f"must be at least {least}")


def _refuse(key: str, value: Any, rule: str) -> None:
    raise ConfigError(f"{key} is {value}; it {rule}", key=key, value=value)
