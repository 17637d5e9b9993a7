"""The configuration of the example: controller, actor, critic, problems, pool and cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcontroller.config.fields import strict_fields
from mcontroller.errors import ConfigError, LayoutError
from mcontroller.ppo.config import PPOConfig
from workers import ActorConfig, CriticConfig, ModelConfig, ParallelConfig, load_config

__all__ = ["DEFAULTS", "ClusterConfig", "Config", "PoolConfig", "ProblemConfig", "check_vocabulary", "read_config"]

DEFAULTS = Path(__file__).with_name("config.yaml")


@strict_fields
@dataclass(frozen=True, slots=True)
class ProblemConfig:
    """The problems: a task of reasoning-gym, and how many different questions of it."""

    task: str = "chain_sum"
    """Name of the task in reasoning-gym."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task, under reasoning-gym's names."""
    train_size: int = 3600
    """[problems] Problems for training."""
    held_out_size: int = 256
    """[problems] Problems for validation; none of them is in the training problems."""
    seed: int = 0
    """Seed of the problems."""


@strict_fields
@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The resource pool that actor and critic share."""

    process_on_nodes: list[int] = field(default_factory=lambda: [4])
    """[bundles] Bundles on each node: one GPU each, or one CPU without GPUs."""
    max_colocate_count: int = 2
    """[slots] Slots for processes in each bundle: one for the actor, one for the critic."""
    use_gpu: bool = False
    """Reserve GPUs; False runs on CPUs."""
    isolate_gpus: bool = False
    """Each process sees only its own GPU, as cuda:0, instead of those of all ranks of its group on the node."""


@strict_fields
@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The Ray cluster."""

    address: str | None = None
    """Address of a running cluster. None: start one on this machine for this run."""
    num_cpus: int = 0
    """[CPUs] CPUs of the cluster that is started. 0: as many as the pool reserves."""
    object_store_memory: int = 300_000_000
    """[bytes] Object store of the cluster that is started."""


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PPOConfig):
    """The configuration of the example; ``config.yaml`` has its values. Actor and critic share ``${model}``."""

    actor_rollout_ref: ActorConfig
    """The actor, its rollout and its reference."""
    critic: CriticConfig
    """The critic."""
    model: ModelConfig
    """The model that actor and critic refer to as ``${model}``."""
    problems: ProblemConfig = field(default_factory=ProblemConfig)
    """The problems to learn."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """The resource pool."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The Ray cluster."""
    layout: int = 4
    """[bundles] Size of the pool, to which ``pool.process_on_nodes`` refers."""
    seed: int = 0
    """Seed to which all other seeds refer."""
    run_dir: str | None = None
    """Directory of the run. None: ``runs/ppo-<date>-<time>``."""
    trackers: list[str] = field(default_factory=lambda: ["jsonl", "tensorboard"])
    """Names of the trackers of metrics: jsonl, tensorboard, console, wandb, mlflow."""

    def __post_init__(self) -> None:
        """Raise LayoutError if the axes of a role do not fit the pool."""
        for role, parallel in (
            ("actor_rollout_ref", self.actor_rollout_ref.parallel),
            ("actor_rollout_ref.rollout", self.actor_rollout_ref.rollout.parallel),
            ("critic", self.critic.parallel),
        ):
            if parallel is not None:
                _check_layout(role, parallel, sum(self.pool.process_on_nodes))

    def within(self, directory: Path) -> Config:
        """Return a copy with every path inside the run's directory."""
        checkpoints = str(directory / self.trainer.default_local_dir)
        trainer = dataclasses.replace(self.trainer, default_local_dir=checkpoints)
        return dataclasses.replace(self, run_dir=str(directory), trainer=trainer)


def read_config(overrides: Iterable[str] = ()) -> Config:
    """Return the configuration of ``config.yaml`` with the overrides ``key.of.a.field=value``.

    Raises:
        ConfigError: an unknown key (the message contains close matches), or a value that does not fit.
        LayoutError: axes that do not divide the pool.
    """
    return load_config(Config, DEFAULTS, overrides=overrides)


def check_vocabulary(config: Config, vocab_size: int) -> None:
    """Raise ConfigError if the model's vocabulary size is not the tokenizer's."""
    for role, model in (("actor_rollout_ref", config.actor_rollout_ref.model), ("critic", config.critic.model)):
        if model.vocab_size != vocab_size:
            raise ConfigError(
                f"{role}.model.vocab_size is {model.vocab_size}; the tokenizer of {config.problems.task} has "
                f"{vocab_size} tokens: set model.vocab_size={vocab_size}",
                key="model.vocab_size",
                value=model.vocab_size,
            )


def _check_layout(role: str, parallel: ParallelConfig, bundles: int) -> None:
    try:
        parallel.layout(bundles)
    except LayoutError as error:
        raise LayoutError(f"{role} on a pool of {bundles} bundles: {error}", **error.fields) from error
