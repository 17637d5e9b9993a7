"""Train with the PPO family: a model, your problems and your reward function, from one configuration.

examples: mcontroller train run.yaml
          mcontroller train run.yaml algorithm.adv_estimator=rloo trainer.total_training_steps=200
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from rich.console import Console

from mcontroller.ppo.saving.preemption import PREEMPTED, Preempted
from workers.run.config import read_run_config
from workers.run.training import interruptible, train

__all__ = ["INTERRUPTED", "add_arguments", "run", "until_interrupted"]

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="CONFIG", help="a YAML file with the fields of workers.run.config:RunConfig")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the file")


def run(arguments: argparse.Namespace) -> int:
    """Train, and return the exit status. No process of the run is left, however it ends."""
    return until_interrupted(lambda: train(read_run_config(arguments.file, arguments.overrides), Console()))


def until_interrupted(action: Callable[[], object]) -> int:
    """Return the exit status: 0 after the action, 75 if it stopped after a step, 130 if it was interrupted at once."""
    with interruptible():
        try:
            action()
        except KeyboardInterrupt:
            sys.stdout.write("interrupted: all processes of the run have ended\n")
            return INTERRUPTED
        except Preempted as stopped:
            sys.stdout.write(f"{stopped.reason}: {_continuation(stopped.global_steps)}\n")
            return PREEMPTED
    return 0


def _continuation(steps: int | None) -> str:
    return "no step was saved" if steps is None else f"step {steps} is saved, mcontroller resume RUN_DIR continues"
