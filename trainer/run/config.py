"""RunConfig: everything that ``mcontroller train`` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mcontroller.config.checks import check_at_least
from mcontroller.config.fields import check_unused, nested_config, strict_fields, unused_if, used_if
from mcontroller.config.imports import absolute_path_of, import_module
from mcontroller.config.load import CollectedErrors, completed_section, given_values, is_referred_to, load_config
from mcontroller.errors import ConfigError
from trainer.config import MultiTurnConfig, PPOConfig
from trainer.data.config import DatasetConfig, ProblemsConfig
from trainer.data.sources import check_dataset
from trainer.data.tokenizers import TokenizerConfig
from trainer.rewards.config import RewardsConfig
from workers.config import ActorConfig, CriticConfig, ModelConfig, ParallelConfig, RewardConfig, RoleConfig
from workers.config.roles import OF_UPDATES
from workers.weights.hf.hub import is_hub_name, local_directory

D = TypeVar("D", bound=DatasetConfig)

OWN_POOL_ROLES = ("rollout", "critic", "ref", "reward_model")
"""The roles that can be in a pool of ``pools``."""
ROLES = ("actor_rollout_ref", *OWN_POOL_ROLES)
"""The fields that are configurations of roles."""
CONFIG_FILE = "config.yaml"
"""Name of the configuration in the run's directory."""
MAIN_POOL = "pool"
"""The name of the pool of all roles that are in no other pool."""
REFERRED = ("model", "layout", "seed")
"""The fields that nothing reads but references to them, such as ``${seed}``."""


@strict_fields
@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The resource pool of the actor, and of every role that is in no pool of ``pools``.

    All fields but ``process_on_nodes`` and ``max_colocate_count`` hold for the pools of ``pools`` too.
    """

    process_on_nodes: list[int] = field(default_factory=lambda: [1])
    """[bundles] Bundles on each node: one GPU each, or one CPU without GPUs."""
    max_colocate_count: int | None = None
    """[slots] Slots for processes in each bundle. None: one for each role in the pool, such as actor and critic."""
    use_gpu: bool = False
    """Reserve GPUs; False runs on CPUs."""
    isolate_gpus: bool = unused_if(False, use_gpu=False)
    """Each process sees only its own GPU, as cuda:0, instead of the GPUs of all ranks of its group on the node."""
    threads: int | None = None
    """Threads that each process computes with on the CPU. None: OMP_NUM_THREADS if it is set; otherwise, without GPUs,
    the cores of the node divided by the bundles of all pools on it."""
    spare_bundles: int = 0
    """[bundles] More bundles on each node, in which a restart places the processes of a node that is lost."""

    def __post_init__(self) -> None:
        """Check the values."""
        _check_nodes("pool.process_on_nodes", self.process_on_nodes)
        if self.max_colocate_count is not None:
            check_at_least("pool.max_colocate_count", self.max_colocate_count, 1)
        check_at_least("pool.spare_bundles", self.spare_bundles, 0)


@strict_fields
@dataclass(frozen=True, slots=True)
class NamedPoolConfig:
    """Another resource pool, with a slot in each bundle for every role in it."""

    field_hints: ClassVar[Mapping[str, str]] = {
        name: f"pool.{name} holds for all pools" for name in ("use_gpu", "isolate_gpus", "threads", "spare_bundles")
    }

    process_on_nodes: list[int]
    """[bundles] Bundles on each node: one GPU each, or one CPU without GPUs, as ``pool.use_gpu`` says."""
    roles: list[str] = field(default_factory=list)
    """The roles in the pool: rollout, critic, ref, reward_model. Empty: the role that is the name of the pool."""


@strict_fields
@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The Ray cluster."""

    address: str | None = None
    """Address of a running cluster. None: start one on this machine for this run."""
    num_cpus: int = used_if(0, address=None)
    """[CPUs] CPUs of the cluster that is started. 0: as many as the pools reserve."""
    object_store_memory: int = used_if(300_000_000, address=None)
    """[bytes] Object store of the cluster that is started."""


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(PPOConfig):
    """The configuration of a run."""

    actor_rollout_ref: ActorConfig
    """The actor, its rollout and its reference policy."""
    rollout: ActorConfig | None = None
    """The rollout in a separate group. None: the rollout is in the actor's workers.

    In a file, values that are not given are taken from actor_rollout_ref; those of
    mappings, such as ``model.transformer``, by key. ``parallel`` is taken over as a whole: if it is given, axes without
    a size are 1.
    """
    critic: CriticConfig | None = None
    """The critic. None: an estimator without a critic."""
    ref: ActorConfig | None = None
    """The reference policy in a separate group. None: it is in the actor's workers."""
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
    """The resource pool of the actor, and of every role that is in no other pool."""
    pools: dict[str, NamedPoolConfig] = field(default_factory=dict)
    """Other resource pools by name, for a rollout, critic, ref or reward_model that is not in ``pool``."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The Ray cluster."""
    layout: int = 1
    """[bundles] A size to which ``pool.process_on_nodes`` can refer as ``${layout}``."""
    seed: int = 0
    """A seed to which other seeds can refer as ``${seed}``."""
    run_dir: str | None = None
    """Directory of the run. None: ``runs/<date>-<time>``."""
    trackers: list[str] = field(default_factory=lambda: ["jsonl"])
    """Names of the trackers of metrics: jsonl, tensorboard, wandb, mlflow."""
    project_name: str = "mcontroller"
    """Name of the project in wandb and mlflow, where it is the experiment."""
    experiment_name: str | None = None
    """Name of the run in the trackers. None: the name of its directory."""

    def __post_init__(self) -> None:
        """Check the other pools; their roles are checked with the rest, see ``trainer.run.pools.pool_errors``."""
        for name, pool in self.pools.items():
            _check_nodes(f"pools.{name}.process_on_nodes", pool.process_on_nodes)
        if len({*self.trackers}) < len(self.trackers):
            text = f"trackers is {self.trackers}, in which a name occurs twice: every step would be logged twice"
            raise ConfigError(text, key="trackers", value=self.trackers)
        if not {*self.trackers} - {"jsonl", "tensorboard"}:
            reason = f"with trackers={self.trackers}, whose files are in the run's directory"
            check_unused(self, ("project_name", "experiment_name"), "", reason)
        self._check_unused()
        if self.trainer.elastic and self.pool.spare_bundles:
            raise ConfigError(
                f"pool.spare_bundles is {self.pool.spare_bundles} and trainer.elastic is true: a lost node is either "
                "replaced by spare bundles or left out. Set one of them",
                key="pool.spare_bundles",
                value=self.pool.spare_bundles,
            )

    def _check_unused(self) -> None:
        """Raise ConfigError if a field is set that a field of another section switches off."""
        actor = self.actor_rollout_ref
        for key, section in (("ref", self.ref), ("rollout", self.rollout)):
            if section is not None:  # which may refer to the whole actor
                own = [name for name in OF_UPDATES if getattr(section, name) != getattr(actor, name)]
                check_unused(section, own, f"{key}.", f"in {key}, which is not trained")
        if not self.warm_up.steps:
            check_unused(actor, ("sft_optim",), "actor_rollout_ref.", "with warm_up.steps=0")
        if not self.trainer.max_restarts:
            check_unused(self.pool, ("spare_bundles",), "pool.", "with trainer.max_restarts=0: a restart takes them")
        if self.data.chat_template is False and self.multi_turn.episode is None:
            reason = "with data.chat_template=false"
            check_unused(self.tokenizer, ("chat_template_kwargs",), "tokenizer.", reason)

    def sections(self) -> dict[str, RoleConfig]:
        """Return the configuration of every role that has one, by its key."""
        return {key: section for key in ROLES if (section := getattr(self, key)) is not None}

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
            mixture={name: _with_absolute_path(dataset) for name, dataset in self.data.mixture.items()},
            val=None if self.data.val is None else _with_absolute_path(self.data.val),
            evaluations={name: _with_absolute_path(evaluation) for name, evaluation in self.data.evaluations.items()},
        )
        roles: dict[str, Any] = {key: _with_absolute_hf_path(section) for key, section in self.sections().items()}
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
            tokenizer=dataclasses.replace(self.tokenizer, path=_downloaded(self.tokenizer.path, "tokenizer.path")),
            **roles,
        )


def read_run_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the configuration in a YAML file, after the modules of its ``imports`` have been imported.

    ``generation_config.json`` of a checkpoint does not change how responses are sampled: its filters, as ``top_k``,
    are for answers, and training on filtered samples trains another policy. Its stop tokens are used.

    Args:
        path: the file.
        overrides: ``key.of.a.field=value``, which replace its values.

    Raises:
        ConfigError: an unknown key (the message contains close matches), a value that does not fit, or a field of
            ``REFERRED`` that nothing refers to.
    """
    overrides = list(overrides)
    config = recorded_run_config(path, overrides)
    _check_references(given_values(path, overrides=overrides), given_values(path))
    return config


def recorded_run_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Return what ``read_run_config`` does of the file that a run has recorded, in which references are resolved."""
    overrides = list(overrides)
    given = given_values(path, overrides=overrides)
    imports = given.get("imports")
    for module in imports if isinstance(imports, list) else ():  # else an error of the field
        import_module(str(module), "imports")
    return load_config(RunConfig, _rollout_defaults(given), path, overrides=overrides)


def _check_references(given: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    """Raise ConfigError if a field of ``REFERRED`` is set and nothing refers to it, such as the seed of the run.

    Args:
        given: the values of the file and the overrides, which may replace a reference of the file.
        written: the values of the file.
    """
    for name in REFERRED:
        if name in given and not (is_referred_to(name, given) or is_referred_to(name, written)):
            raise ConfigError(
                f"{name} is set, and nothing refers to it: leave it out, or write ${{{name}}} for the values of fields "
                "that it is to set",
                key=name,
                value=given[name],
            )


def tokenizer_files(directory: Path) -> str | None:
    """Return the directory with the files of a run's tokenizer; None if it has none."""
    files = directory / "tokenizer"
    return str(files) if files.is_dir() else None


def check_files(config: RunConfig) -> None:
    """Check that the files and directories that a run reads exist, before torch is imported.

    Raises:
        ConfigError: some do not; all of them are reported together.
    """
    errors = CollectedErrors()
    for key, dataset in (config.data.training_sets() | config.data.held_out_sets()).items():
        errors.attempt(partial(check_dataset, dataset, key))
    directories = {f"{key}.model.hf_path": section.model.hf_path for key, section in config.sections().items()}
    if config.tokenizer.kind == TokenizerConfig().kind:  # another kind may not read a directory
        directories["tokenizer.path"] = config.tokenizer.path
    for key, path in directories.items():
        if path is not None:
            errors.attempt(partial(local_directory, path, key))
    for name, function in config.rewards.functions.items():
        file, key = function.function.rpartition(":")[0], f"rewards.functions.{name}.function"
        if file.endswith(".py") and not Path(file).is_file():
            text = f"{key} is {function.function!r}, and there is no file {file!r} (in {Path.cwd()})"
            errors.errors.append(ConfigError(text, key=key, value=function.function))
    errors.raise_any()


def _rollout_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return interpolations of the actor's values for the keys that a section ``rollout`` does not have.

    Args:
        given: the values of the file and the overrides.
    """
    rollout, actor = given.get("rollout"), given.get("actor_rollout_ref")
    if not isinstance(rollout, Mapping) or not isinstance(actor, Mapping) or "model" not in actor:
        return {}
    without = {name: value for name, value in given.items() if name != "rollout"}
    values = completed_section(RunConfig, without, "actor_rollout_ref")
    return {"rollout": _interpolations(ActorConfig, rollout, values, "actor_rollout_ref")}


def _interpolations(cls: type | None, given: Mapping[str, Any], values: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Return interpolations of the values of a section that are not given; of mappings but layouts, by key.

    Args:
        cls: the dataclass of the section; None: a mapping of any keys, such as ``model.transformer``.
        given: the values that replace those of the section.
        values: of the section.
        at: its key.
    """
    interpolations: dict[str, Any] = {}
    for name in values if cls is None else [item.name for item in dataclasses.fields(cls)]:
        nested = None if cls is None else nested_config(cls, name)
        below = values.get(name)
        if name not in given:
            interpolations[name] = f"${{{at}.{name}}}"
        elif nested is not ParallelConfig and isinstance(given[name], Mapping) and (nested or isinstance(below, dict)):
            interpolations[name] = _interpolations(nested, given[name], below or {}, f"{at}.{name}")
    return interpolations


def _check_nodes(key: str, counts: list[int]) -> None:
    if not counts:
        text = f"{key} is empty; expected the number of bundles on each node, at least one"
        raise ConfigError(text, key=key, value=counts)
    for count in counts:
        check_at_least(key, count, 1)


def _with_absolute_path(dataset: D) -> D:
    paths = [_absolute(path) for path in dataset.paths]
    return dataclasses.replace(dataset, path=paths if len(paths) > 1 else paths[0])


def _with_absolute_hf_path(section: RoleConfig) -> RoleConfig:
    model = dataclasses.replace(section.model, hf_path=_downloaded(section.model.hf_path, "hf_path"))
    if model.lora is not None:
        model = dataclasses.replace(model, lora=dataclasses.replace(model.lora, path=_absolute(model.lora.path)))
    return dataclasses.replace(section, model=model)


def _downloaded(path: str | None, key: str) -> str | None:
    return _absolute(local_directory(path, key) if path is not None and is_hub_name(path) else path)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())
