"""Configuration of the controller program; the configurations of the workers are passed to them unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcontroller.config.checks import check_at_least, check_between, check_one_of
from mcontroller.config.fields import strict_fields
from mcontroller.ppo.advantages import ADVANTAGE_ESTIMATORS
from mcontroller.ppo.devices import OFFLOAD_CHOICES
from mcontroller.ppo.kl import KL_ESTIMATORS
from mcontroller.ppo.kl_control import KLControlConfig

__all__ = ["AlgorithmConfig", "DataConfig", "PPOConfig", "TrainerConfig", "WarmUpConfig"]


@strict_fields
@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """The computation of advantages from scores."""

    adv_estimator: str = "gae"
    """Name of the advantage estimator: gae (needs a critic), grpo, rloo, or one that you registered."""
    gamma: float = 1.0
    """Discount factor per token, 0 to 1."""
    lam: float = 1.0
    """Lambda of generalized advantage estimation, 0 to 1."""
    normalize_advantages: bool = True
    """Scale advantages to mean 0 and variance 1 over all response tokens of the batch."""
    use_kl_in_reward: bool = True
    """Subtract a KL penalty to the reference policy from the scores."""
    kl_penalty: str = "k1"
    """Name of the KL estimator in the penalty: k1, k2, k3, abs, or one registered with ``register_kl_estimator``."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Weight of the KL penalty."""

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            check_between(f"algorithm.{name}", getattr(self, name), 0.0, 1.0)
        ADVANTAGE_ESTIMATORS.get_or_raise(self.adv_estimator)
        KL_ESTIMATORS.get_or_raise(self.kl_penalty, key="algorithm.kl_penalty")


@strict_fields
@dataclass(frozen=True, slots=True)
class DataConfig:
    """Batches of problems."""

    train_batch_size: int = 256
    """[problems] Problems of one step."""
    val_batch_size: int = 0
    """[problems] Held-out problems that are generated at once. 0: all."""
    seed: int = 0
    """Seed of the order of the problems."""

    def __post_init__(self) -> None:
        check_at_least("data.train_batch_size", self.train_batch_size, 1)
        check_at_least("data.val_batch_size", self.val_batch_size, 0)


@strict_fields
@dataclass(frozen=True, slots=True)
class WarmUpConfig:
    """A supervised phase before PPO."""

    steps: int = 0
    """[optimizer steps] Length of the phase. 0: none."""
    batch_size: int = 256
    """[demonstrations] Demonstrations of one step."""

    def __post_init__(self) -> None:
        check_at_least("warm_up.steps", self.steps, 0)
        check_at_least("warm_up.batch_size", self.batch_size, 1)


@strict_fields
@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Length of the run, and when it is validated and saved."""

    total_training_steps: int = 100
    """[steps] Steps of PPO."""
    critic_warmup: int = 0
    """[steps] Steps at the start in which only the critic is trained."""
    val_before_train: bool = True
    """Validate before the first step as well."""
    test_freq: int = 0
    """[steps] Validate every so many steps and after the last one. 0: only after the last one. -1: never."""
    save_freq: int = 0
    """[steps] Save a checkpoint every so many steps and after the last one. 0: only after the last one. -1: never."""
    max_to_keep: int | None = None
    """[checkpoints] Checkpoints that are kept. None: all."""
    default_local_dir: str = "checkpoints"
    """Directory of the checkpoints."""
    resume: bool = False
    """Continue from the last checkpoint in default_local_dir."""
    offload: str = "auto"
    """Hand over memory around stages: auto (groups that share GPUs), always (all groups, on CPUs too), or never.

    A group that is not called moves its weights and its optimizer to host memory. A group that is called keeps what the
    method needs: an update all of its parts, generation and scoring the weights.
    """

    def __post_init__(self) -> None:
        check_one_of("trainer.offload", self.offload, OFFLOAD_CHOICES)
        check_at_least("trainer.total_training_steps", self.total_training_steps, 0)
        check_at_least("trainer.critic_warmup", self.critic_warmup, 0)
        check_at_least("trainer.test_freq", self.test_freq, -1)
        check_at_least("trainer.save_freq", self.save_freq, -1)
        if self.max_to_keep is not None:
            check_at_least("trainer.max_to_keep", self.max_to_keep, 1)


@strict_fields
@dataclass(frozen=True, slots=True)
class PPOConfig:
    """Everything that ``RayPPOTrainer`` reads. Derive from it to declare the types of the workers' configurations."""

    actor_rollout_ref: Any
    """The ``config`` argument of the actor's worker class."""
    critic: Any = None
    """The ``config`` argument of the critic's worker class. None: no critic."""
    ref: Any = None
    """The ``config`` argument of the reference's worker class. None: the reference is in the actor's workers."""
    reward_model: Any = None
    """The ``config`` argument of the reward model's worker class. None: no reward model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Batches of problems."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """The computation of advantages from scores."""
    warm_up: WarmUpConfig = field(default_factory=WarmUpConfig)
    """A supervised phase before PPO."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Length of the run, and when it is validated and saved."""
