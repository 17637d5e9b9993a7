"""RunConfig: everything that ``mcontroller train`` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mcontroller.config.checks import check_at_least
from mcontroller.config.fields import strict_fields
from mcontroller.config.imports import absolute_path_of, import_module
from mcontroller.config.load import load_config, read_yaml
from mcontroller.errors import ConfigError
from mcontroller.ppo.config import PPOConfig
from mcontroller.ppo.datasets.config import DatasetConfig, ProblemsConfig
from mcontroller.ppo.datasets.tokenizers import TokenizerConfig
from mcontroller.ppo.scoring.config import RewardsConfig
from mcontroller.ppo.turns.environment import MultiTurnConfig
from workers.config import ActorConfig, CriticConfig, ModelConfig, RewardConfig

__all__ = ["ClusterConfig", "PoolConfig", "RunConfig", "read_run_config"]


ROLES = ("actor_rollout_ref", "rollout", "critic", "ref", "reward_model")
"""The fields that are configurations of roles."""


@strict_fields
@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The resource pool that all roles share."""

    process_on_nodes: list[int] = field(default_factory=lambda: [1])
    """[bundles] Bundles on each node: one GPU each, or one CPU without GPUs."""
    max_colocate_count: int = 2
    """[slots] Slots for processes in each bundle: one for each group, such as the actor and the critic."""
    use_gpu: bool = False
    """Reserve GPUs; False runs on CPUs."""
    isolate_gpus: bool = False
    """Each process sees only its own GPU, as cuda:0, instead of those of all ranks of its group on the node."""
    record_collectives: bool = True
    """Each process records its last collectives; ``CallTimeout`` then reports which rank waits for which."""
    threads: int | None = None
    """Threads that each process computes with on the CPU. None: OMP_NUM_THREADS if it is set; otherwise, without GPUs,
    the cores of the node divided by its processes of one group."""

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.process_on_nodes:
            text = "pool.process_on_nodes is empty; expected the number of bundles on each node, at least one"
            raise ConfigError(text, key="pool.process_on_nodes", value=self.process_on_nodes)
        for count in self.process_on_nodes:
            check_at_least("pool.process_on_nodes", count, 1)
        check_at_least("pool.max_colocate_count", self.max_colocate_count, 1)


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
class RunConfig(PPOConfig):
    """The configuration of a run."""

    actor_rollout_ref: ActorConfig
    """The actor, its rollout and its reference."""
    rollout: ActorConfig | None = None
    """The rollout in a group of its own. None: the rollout is in the actor's workers."""
    critic: CriticConfig | None = None
    """The critic. None: an estimator without a critic."""
    ref: ActorConfig | None = None
    """The reference in a group of its own. None: the reference is in the actor's workers."""
    reward_model: RewardConfig | None = None
    """The reward model. None: no reward model."""
    data: ProblemsConfig = field(default_factory=ProblemsConfig)
    """The problems, and their batches."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer."""
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    """The reward functions."""
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    """Responses of several turns, such as with tools."""
    model: ModelConfig | None = None
    """A model that the roles can refer to as ``${model}``."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """The resource pool."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The Ray cluster."""
    layout: int = 1
    """[bundles] A size to which ``pool.process_on_nodes`` can refer as ``${layout}``."""
    seed: int = 0
    """A seed to which other seeds can refer as ``${seed}``."""
    run_dir: str | None = None
    """Directory of the run. None: ``runs/<date>-<time>``."""
    trackers: list[str] = field(default_factory=lambda: ["jsonl"])
    """Names of the trackers of metrics: jsonl, tensorboard, console, wandb, mlflow, trackio."""
    imports: list[str] = field(default_factory=list)
    """Modules, or files that end in .py, that are imported first: they register your own losses, tokenizers, etc."""

    def within(self, directory: Path) -> RunConfig:
        """Return a copy with the checkpoints inside the run's directory, and all paths absolute."""
        trainer = dataclasses.replace(
            self.trainer,
            default_local_dir=str(directory / self.trainer.default_local_dir),
            export_hf=_absolute(self.trainer.export_hf),
        )
        data = dataclasses.replace(
            self.data,
            train=_with_absolute_path(self.data.train),
            val=None if self.data.val is None else _with_absolute_path(self.data.val),
        )
        functions = {
            name: dataclasses.replace(function, function=absolute_path_of(function.function))
            for name, function in self.rewards.functions.items()
        }
        return dataclasses.replace(
            self,
            run_dir=str(directory),
            trainer=trainer,
            data=data,
            rewards=dataclasses.replace(self.rewards, functions=functions),
            imports=[absolute_path_of(path) for path in self.imports],
            tokenizer=dataclasses.replace(self.tokenizer, path=_absolute(self.tokenizer.path)),
            **{role: _with_absolute_hf_path(getattr(self, role)) for role in ROLES},
        )


def read_run_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the configuration in a YAML file, after the modules of its ``imports`` have been imported.

    Args:
        path: the file.
        overrides: ``key.of.a.field=value``, which replace its values.

    Raises:
        ConfigError: an unknown key (the message contains close matches), or a value that does not fit.
    """
    overrides = list(overrides)
    for module in _imports(Path(path), overrides):
        import_module(module, "imports")
    return load_config(RunConfig, path, overrides=overrides)


def _imports(path: Path, overrides: list[str]) -> list[str]:
    """Return ``imports`` of a file and overrides, without reading the rest."""
    chosen = OmegaConf.from_dotlist([each for each in overrides if each.startswith("imports=")])
    given = OmegaConf.merge(read_yaml(path), chosen)
    found = OmegaConf.select(given, "imports")
    if found is None:
        return []
    if not OmegaConf.is_list(found):
        raise ConfigError(f"imports is {found!r}; expected a list of modules", key="imports", value=found)
    return [str(each) for each in found]


def _with_absolute_path(dataset: DatasetConfig) -> DatasetConfig:
    return dataclasses.replace(dataset, path=_absolute(dataset.path))


def _with_absolute_hf_path(section: Any) -> Any:
    if section is None:
        return None
    return dataclasses.replace(
        section, model=dataclasses.replace(section.model, hf_path=_absolute(section.model.hf_path))
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())
