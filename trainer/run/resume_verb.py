"""Continue a run from its last checkpoint, with the configuration in its directory.

examples: mcontroller resume runs/20260101-120000
          mcontroller resume runs/20260101-120000 trainer.total_training_steps=400
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from mcontroller.config.load import given_values
from mcontroller.errors import DataError
from mcontroller.files import moved_path
from trainer.report.reading import read_summary
from trainer.run.config import CONFIG_FILE, RunConfig, check_files, read_run_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("directory", metavar="RUN_DIR", help="the directory of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the run's")


def run(arguments: argparse.Namespace) -> int:
    """Continue the run, and return the exit status."""
    overrides = [*arguments.overrides, "trainer.resume=true"]
    config = config_of_run(arguments.directory, overrides)
    check_files(config)
    from trainer.run.training import train, until_interrupted  # torch, Megatron and Ray: seconds

    return until_interrupted(lambda: train(config, Console()))


def config_of_run(directory: str, overrides: list[str]) -> RunConfig:
    """Return the configuration of a run, for the place where its directory is now, and as long as it was to be last.

    Checkpoints that were inside of it have moved with it; others are where the configuration says. The steps are those
    of the last process of the run, which may have been resumed with more.

    Raises:
        DataError: the directory contains no run, or a file of it is damaged.
    """
    path = Path(directory).resolve()
    if not (path / CONFIG_FILE).is_file():
        raise DataError(f"{directory} contains no run: there is no {path / CONFIG_FILE}", path=str(path))
    recorded = given_values(path / CONFIG_FILE)
    trainer = recorded.get("trainer")
    checkpoints = trainer.get("default_local_dir") if isinstance(trainer, Mapping) else None
    place = moved_path(str(checkpoints or "checkpoints"), str(recorded.get("run_dir") or path), path)
    processes = read_summary(path).get("processes") or [{}]
    last = (processes[-1].get("config") or {}).get("trainer") or {}
    length = [f"trainer.{name}={last[name]}" for name in ("total_training_steps", "epochs") if name in last]
    moved = [f"run_dir={path}", f"trainer.default_local_dir={place}"]
    return read_run_config(path / CONFIG_FILE, [*moved, *length, *overrides])
