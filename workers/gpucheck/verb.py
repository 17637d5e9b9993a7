"""Check GPUs against a CPU reference: devices, scores, tokens, updates, checkpoints, memory, speed.

Run this first on a new machine. It prints a table and ends with status 0 if every row is ok, 1 if a row failed, and 2
if there is no GPU that torch can use. docs/gpu.md explains every row, and what to do when it fails.

examples: mcontroller gpucheck
          mcontroller gpucheck --smallest --json gpu.json
          python -m workers.gpucheck --only scores --only tokens     (needs only torch and megatron-core)
          mcontroller gpucheck --device cpu --small                  (the same rows on a machine without a GPU)
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from workers.gpucheck.machine import cpu_problem, gpu_problem, transformer_engine_problem
from workers.gpucheck.rows import Table, status_of

__all__ = ["NAMES", "SMALLEST", "UNUSABLE", "add_arguments", "run"]

UNUSABLE = 2
"""Exit status if there is nothing to check: no GPU, or a wrong argument."""

NAMES = (
    "machine",
    "arithmetic",
    "placement",
    "scores",
    "tokens",
    "updates",
    "checkpoints",
    "offload",
    "synchronisations",
    "generation",
    "training",
    "transfer",
    "collectives",
    "layouts",
    "ray",
)
"""The checks, in the order in which they run."""

SMALLEST = ("machine", "arithmetic", "placement", "scores", "tokens")
"""The checks of ``--smallest``, with one model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device to check; default: cuda")
    parser.add_argument("--only", action="append", choices=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--smallest", action="store_true", help=f"one model, and only {', '.join(SMALLEST)}")
    parser.add_argument("--small", action="store_true", help="small models for memory and speed too")
    parser.add_argument("--ranks", type=int, help="ranks of collectives, layouts, ray; default: the GPUs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the table and return the exit status."""
    problem = gpu_problem() if arguments.device == "cuda" else cpu_problem()
    if problem is not None:
        sys.stderr.write(f"gpucheck: {problem}\n")
        return UNUSABLE
    transformer_engine = transformer_engine_problem() if arguments.device == "cuda" else None
    from workers.gpucheck.run import run_checks  # imports Megatron, which a broken Transformer Engine would stop
    from workers.gpucheck.session import Session

    started = time.monotonic()
    table = Table(sys.stdout)
    names = [name for name in NAMES if name in (arguments.only or (SMALLEST if arguments.smallest else NAMES))]
    with Session(
        arguments.device,
        smallest=arguments.smallest,
        small=arguments.small or arguments.device == "cpu",
        ranks=arguments.ranks,
        transformer_engine=transformer_engine,
    ) as session:
        run_checks(session, names, table)
    seconds = time.monotonic() - started
    sys.stdout.write(f"{table.summary()}\n{seconds:.0f} s\n")
    if arguments.json is not None:
        table.write_json(arguments.json, seconds)
    return status_of(table.rows)
