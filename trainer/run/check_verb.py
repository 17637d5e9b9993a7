"""Check a configuration with its data, and print layouts, locality, resources and estimated memory; start nothing.

examples: mcontroller check run.yaml
          mcontroller check run.yaml pool.process_on_nodes=[8,8] actor_rollout_ref.parallel.tp=4 --layouts
"""

from __future__ import annotations

import argparse

from trainer.run.config import check_files, read_run_config
from workers.planning import planning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
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
        config = read_run_config(arguments.file, arguments.overrides)
        check_files(config)
        from trainer.run.check_report import report  # torch, Megatron and Ray: seconds

        return report(arguments, config)
