"""Train with the PPO family: a model, your problems and your reward function, from one configuration.

examples: mcontroller train run.yaml
          mcontroller train run.yaml algorithm.adv_estimator=rloo trainer.total_training_steps=200
          mcontroller train --replay runs/20260101-120000
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from mcontroller.errors import ConfigError
from trainer.run.config import RunConfig, check_files, read_run_config
from trainer.run.resume_verb import config_of_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "file", nargs="?", metavar="CONFIG", help="a YAML file with the fields of trainer.run.config:RunConfig"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    parser.add_argument(
        "--replay",
        metavar="RUN_DIR",
        help="train on the responses that an asynchronous run has recorded, in RUN_DIR-replay, to the same weights",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, and return the exit status. No process of the run is left, however it ends."""
    config = _config(arguments.replay, [arguments.file] if arguments.file else [], arguments.overrides)
    if config.trainer.asynchronous.replay is not None and config.trainer.resume:
        from trainer.saving.checkpoints import copy_oldest_save

        target = Path(config.run_dir or ".", config.trainer.default_local_dir)
        target.mkdir(parents=True, exist_ok=True)
        copy_oldest_save(Path(config.trainer.asynchronous.replay), target)
    from trainer.run.training import train, until_interrupted  # torch, Megatron and Ray: seconds

    return until_interrupted(lambda: train(config, Console()))


def _config(replay: str | None, file: list[str], overrides: list[str]) -> RunConfig:
    if replay is not None:
        path, recorded = Path(replay).resolve(), config_of_run(replay, []).trainer.default_local_dir
        later = (
            any(Path(recorded).glob("trajectories/*.npz")) and not Path(recorded, "trajectories/00000000.npz").exists()
        )
        settings = [f"run_dir={path}-replay", f"trainer.asynchronous.replay={recorded}", f"trainer.resume={later}"]
        config = config_of_run(replay, [*settings, "trainer.default_local_dir=checkpoints", *file, *overrides])
        check_files(config)
        return config
    if not file:
        raise ConfigError("train needs a CONFIG, or --replay RUN_DIR", key="file")
    config = read_run_config(file[0], overrides)
    check_files(config)
    return config
