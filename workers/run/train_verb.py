"""Train with the PPO family: a model, your problems and your reward function, from one configuration.

examples: mcontroller train run.yaml
          mcontroller train run.yaml algorithm.adv_estimator=rloo trainer.total_training_steps=200
"""

from __future__ import annotations

import argparse

from rich.console import Console

from workers.run.config import check_files, read_run_config

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="CONFIG", help="a YAML file with the fields of workers.run.config:RunConfig")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")


def run(arguments: argparse.Namespace) -> int:
    """Train, and return the exit status. No process of the run is left, however it ends."""
    config = read_run_config(arguments.file, arguments.overrides)
    check_files(config)
    from workers.run.training import train, until_interrupted  # torch, Megatron and Ray: seconds

    return until_interrupted(lambda: train(config, Console()))
