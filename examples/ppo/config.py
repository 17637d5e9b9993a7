"""The whole configuration of the example: the controller's, both workers', the problems', the pool's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from examples.ppo.data import ProblemConfig
from mcontroller.errors import ConfigError, LayoutError
from mcontroller.ppo.config import PPOConfig
from workers import ActorConfig, CriticConfig, ModelConfig, ParallelConfig, load_config

__all__ = ["DEFAULTS", "ClusterConfig", "Config", "PoolConfig", "read_config"]

DEFAULTS = Path(__file__).with_name("config.yaml")


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The pool that actor and critic share: places on each node, and slots for processes on each place."""

    process_on_nodes: list[int] = field(default_factory=lambda: [4])
    max_colocate_count: int = 2
    use_gpu: bool = False


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The Ray cluster: that at ``address``, or one of ``num_cpus`` (0: as many as the pool asks for) for this run."""

    address: str | None = None
    num_cpus: int = 0
    object_store_memory: int = 300_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PPOConfig):
    """What ``config.yaml`` sets. ``model`` is shared by actor and critic through ``${model}``."""

    actor_rollout_ref: ActorConfig
    critic: CriticConfig
    model: ModelConfig
    problems: ProblemConfig = field(default_factory=ProblemConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    layout: int = 4
    seed: int = 0
    run_dir: str | None = None
    trackers: list[str] = field(default_factory=lambda: ["jsonl", "tensorboard"])

    def __post_init__(self) -> None:
        """Raises LayoutError where the axes of a role do not fit the pool."""
        for role, parallel in (
            ("actor_rollout_ref", self.actor_rollout_ref.parallel),
            ("actor_rollout_ref.rollout", self.actor_rollout_ref.rollout.parallel),
            ("critic", self.critic.parallel),
        ):
            if parallel is not None:
                _check_layout(role, parallel, sum(self.pool.process_on_nodes))

    def within(self, directory: Path) -> Config:
        """The same with every path inside the run's directory."""
        checkpoints = str(directory / self.trainer.default_local_dir)
        trainer = dataclasses.replace(self.trainer, default_local_dir=checkpoints)
        return dataclasses.replace(self, run_dir=str(directory), trainer=trainer)


def read_config(overrides: Iterable[str] = ()) -> Config:
    """``config.yaml`` with ``key.of.a.field=value`` over it.

    Raises:
        ConfigError: an unknown key, with its close matches, or a value that does not fit.
        LayoutError: axes that do not divide the pool, with the numbers.
    """
    return load_config(Config, DEFAULTS, overrides=overrides)


def check_vocabulary(config: Config, vocab_size: int) -> None:
    """Raises ConfigError where the model's vocabulary is not that of the tokenizer."""
    for role, model in (("actor_rollout_ref", config.actor_rollout_ref.model), ("critic", config.critic.model)):
        if model.vocab_size != vocab_size:
            raise ConfigError(
                f"{role}.model.vocab_size is {model.vocab_size}; the tokenizer of {config.problems.task} has "
                f"{vocab_size} tokens: set model.vocab_size={vocab_size}",
                key="model.vocab_size",
                value=model.vocab_size,
            )


def _check_layout(role: str, parallel: ParallelConfig, places: int) -> None:
    try:
        parallel.layout(places)
    except LayoutError as error:
        raise LayoutError(f"{role} on a pool of {places} places: {error}", **error.fields) from error
