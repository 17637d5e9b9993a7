"""Print the bytes that the ranks of a layout communicate in a training step; start nothing.

examples: mcontroller communication run.yaml
          mcontroller communication actor.yaml parallel.tp=4 parallel.pp=2 --role actor_rollout_ref --world-size 64
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcontroller.errors import ConfigError
from workers.config import ActorConfig

if TYPE_CHECKING:
    from workers.communication.estimate import Traffic

_ROLE = "actor_rollout_ref"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    parser.add_argument("--role", help=f"the file has the configuration of this role only: {_ROLE} or ref")
    parser.add_argument(
        "--config", metavar="MODULE:CLASS", help="the dataclass of the file, if your program defines one"
    )
    parser.add_argument("--world-size", type=int, help="ranks of the group; by default as many as the role's pool has")


def run(arguments: argparse.Namespace) -> int:
    """Print the table of the actor."""
    from trainer.run.check_report import layout_of_role, pool_size, read_roles
    from workers.communication.estimate import StepRows, communication_of_step  # with torch and Megatron

    config, roles = read_roles(arguments)
    role = roles.get(arguments.role or _ROLE)
    if not isinstance(role, ActorConfig):
        raise ConfigError(f"{arguments.file} has no actor; expected the section {_ROLE}", key=_ROLE)
    world_size = arguments.world_size or pool_size(config, arguments.role or _ROLE)
    rollout = role.rollout
    step = StepRows(role.ppo_mini_batch_size, rollout.prompt_length + rollout.response_length, rollout.response_length)
    lines = [
        layout_of_role(role, world_size),
        f"one optimizer step: {step.rows} rows of {step.length} tokens, {step.targets} of them trained on, in "
        f"micro-batches of {role.ppo_micro_batch_size}",
        "",
        traffic_table(communication_of_step(role, world_size, step)),
        "",
    ]
    sys.stdout.write("\n".join(lines))
    return 0


def traffic_table(traffic: Sequence[Traffic]) -> str:
    """Return a table with the bytes of all ranks by axis, operation and group, and their sum."""
    lines = [f"{'axis':12}{'operation':24}{'bytes':>18}  group"]
    lines += [f"{each.axis:12}{each.operation:24}{each.nbytes:>18}  {each.group}" for each in traffic]
    return "\n".join([*lines, f"{'all':36}{sum(each.nbytes for each in traffic):>18}"])
