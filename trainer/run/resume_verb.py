"""Continue a run from its last checkpoint, with the configuration in its directory.

examples: mcontroller resume runs/20260101-120000
          mcontroller resume runs/20260101-120000 trainer.total_training_steps=400
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from mcontroller.config.load import given_values
from mcontroller.errors import ConfigError, DataError
from mcontroller.files import moved_path
from trainer.run.config import CONFIG_FILE, REFERRED, RunConfig, check_files, recorded_run_config
from workers.config import RoleConfig

FIXED = {"run_dir": "it is RUN_DIR", "trainer.resume": "it is true"}
"""Keys that a resumed run cannot change, and why."""
RESOLVED = dict.fromkeys(REFERRED, "the fields that refer to it have its value in config.yaml: set these")
"""Keys that a run cannot change once its configuration is written, without references, and why."""
CHANGEABLE = {
    *("max_sequence_length", "attention_dropout", "hidden_dropout", "init_method_std", "dtype", "seed"),
    *("hf_path", "provider", "family", "verify_load", "transformer_impl", "transformer", "freeze", "train_only"),
}
"""Fields of a trained model that a resumed run can change; with others, its weights would compute something else."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("directory", metavar="RUN_DIR", help="the directory of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the run's")


def run(arguments: argparse.Namespace) -> int:
    """Continue the run, and return the exit status."""
    check_overrides(arguments.overrides, FIXED)
    config = config_of_run(arguments.directory, [*arguments.overrides, "trainer.resume=true"])
    check_models(config_of_run(arguments.directory, []), config)
    check_files(config)
    from trainer.run.training import train, until_interrupted  # torch, Megatron and Ray: seconds

    return until_interrupted(lambda: train(config, Console()))


def config_of_run(directory: str, overrides: list[str]) -> RunConfig:
    """Return the configuration of a run, for the place where its directory is now.

    Checkpoints that were inside of it have moved with it; others are where the configuration says.

    Raises:
        ConfigError: an override is of a key of ``RESOLVED``.
        DataError: the directory contains no run.
    """
    check_overrides(overrides, RESOLVED)
    path = Path(directory).resolve()
    if not (path / CONFIG_FILE).is_file():
        raise DataError(f"{directory} contains no run: there is no {path / CONFIG_FILE}", path=str(path))
    recorded = given_values(path / CONFIG_FILE)
    trainer = recorded.get("trainer")
    checkpoints = trainer.get("default_local_dir") if isinstance(trainer, Mapping) else None
    place = moved_path(str(checkpoints or "checkpoints"), str(recorded.get("run_dir") or path), path)
    moved = [f"run_dir={path}", f"trainer.default_local_dir={place}"]
    return recorded_run_config(path / CONFIG_FILE, [*moved, *overrides])


def check_overrides(overrides: Iterable[str], fixed: Mapping[str, str]) -> None:
    """Raise ConfigError for an override of a key that is fixed, or of a field below it.

    Args:
        overrides: ``key.of.a.field=value``.
        fixed: why each of these keys cannot change.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        for name, reason in fixed.items():
            if f"{key}.".startswith(f"{name}."):
                text = f"{override}: {name} cannot change when a run goes on; {reason}"
                raise ConfigError(text, key=key, value=value)


def check_models(before: RunConfig, after: RunConfig) -> None:
    """Raise ConfigError if a trained role has another model than the checkpoints of the run."""
    for role in ("actor_rollout_ref", "critic"):
        models = [_fixed_fields(config.sections()[role]) for config in (before, after) if role in config.sections()]
        for name, trained in models[0].items() if len(models) == 2 else ():
            if (given := models[1][name]) != trained:
                key = f"{role}.model.{name}"
                text = f"{key} is {given}, and the weights of the run were trained with {trained}: leave it out"
                raise ConfigError(text, key=key, value=given)


def _fixed_fields(role: RoleConfig) -> dict[str, Any]:
    model = dataclasses.asdict(role.model)
    if model["lora"] is not None:
        del model["lora"]["path"]  # where the adapter was before the first step
    return {name: value for name, value in model.items() if name not in CHANGEABLE}
