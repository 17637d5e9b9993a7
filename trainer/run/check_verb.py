"""Check a configuration with its data, and print layouts, locality, resources and estimated memory; start nothing.

examples: mcontroller check run.yaml
          mcontroller check actor.yaml --role actor_rollout_ref --world-size 8 optim.distributed_optimizer=true
          mcontroller check run.yaml --world-size 8 --config my_program.config:Config
"""

from __future__ import annotations

import argparse

from mcontroller.config.load import CollectedErrors
from mcontroller.errors import ConfigError
from trainer.run.config import RunConfig, read_with_files
from workers.planning import planning

_READ_BY = {
    "algorithm.adv_estimator": "role_worker_mapping",
    "data.train_batch_size": "batch_size",
    "pool.process_on_nodes": "world_size",
}
"""Key of a field -> the key, or another field, of errors that its default may cause in place of a rejected value."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    parser.add_argument("--role", help="the file has the configuration of this role only, e.g. critic")
    parser.add_argument(
        "--config", metavar="MODULE:CLASS", help="the dataclass of the file, if your program defines one"
    )
    parser.add_argument("--world-size", type=int, help="ranks of each group; by default as many as the role's pool has")
    parser.add_argument(
        "--layouts",
        action="store_true",
        help="list the layouts in which training of the actor fits in a GPU: half a minute or more for large models",
    )
    parser.add_argument(
        "--gpu-memory",
        metavar="GB",
        type=float,
        help="memory of a GPU for --layouts and --dry-run, in 2**30 bytes; default: that of this machine's, or 80",
    )
    parser.add_argument(
        "--layers",
        choices=("transformer_engine", "local"),
        help="implementation of the layers; default: transformer_engine on GPUs, local with pool.use_gpu=false",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="end with a dry run of every call: seconds for small models, or minutes"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the layouts and the memory table."""
    with planning():
        of_run = arguments.role is None and arguments.config is None
        if arguments.dry_run and not of_run:
            raise ConfigError("--dry-run needs the file of a whole run: leave --role and --config out", key="--dry-run")
        config = _read_run(arguments.file, arguments.overrides) if of_run else None
        from trainer.run.check_report import report  # torch, Megatron and Ray: seconds

        return report(arguments, config)


def _read_run(file: str, overrides: list[str]) -> RunConfig:
    """Return the configuration of a run, or raise the errors of its fields and files, and of its parts with them."""
    errors = CollectedErrors()
    config = read_with_files(file, overrides, errors)
    if errors.errors and config is not None:
        from trainer.run.parts import make_parts

        rejected = {getattr(error, "key", "") for error in errors.errors} - {""}
        of_defaults = rejected | {_READ_BY[key] for key in rejected & _READ_BY.keys()}
        of_parts = CollectedErrors()
        of_parts.attempt(lambda: make_parts(config))
        for error in of_parts.errors:
            if of_defaults.isdisjoint({getattr(error, "key", ""), *error.fields}):
                errors.errors.append(error)
    errors.raise_any()
    assert config is not None
    return config
