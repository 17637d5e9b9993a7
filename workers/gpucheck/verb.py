"""Check GPUs, first of all on a new machine: equality with the CPU, speed and memory, saves, groups on Ray.

Prints a line of JSON for each row as soon as it is known, and at the end a table on standard error. The status is 0 if
no row failed, 1 if one did or nothing was checked, and 2 if there is no GPU that torch can use.

part a: versions, kernels of attention, and scores, tokens, updates and checkpoints against the CPU
part b: peak memory, micro-batches of different widths and decoding, with a model of the shape of a 1.7B model
part c: offload and reload, save and load, with the same model
part d: groups on Ray: worker processes, two groups on one GPU, engines, NCCL; parts a to c do without Ray

examples: python -m workers.gpucheck > rows.jsonl
          python -m workers.gpucheck --part a --part b      (needs only torch and megatron-core)
          python -m workers.gpucheck --part c --folder /scratch
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from workers.gpucheck.checks import run_parts
from workers.gpucheck.machine import gpu_error
from workers.gpucheck.rows import Report
from workers.gpucheck.session import Session

__all__ = ["UNUSABLE", "add_arguments", "run"]

UNUSABLE = 2
"""Exit status if there is no GPU, or an argument is wrong."""

_PARTS = ("a", "b", "c", "d")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("--part", action="append", choices=_PARTS, help="run only this part; may be repeated")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="tiny: the smallest sizes")
    parser.add_argument(
        "--folder", type=Path, help="where part c saves about 30 GB; default: the directory of temporary files"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the rows and the table, and return the exit status."""
    error = gpu_error()
    if error is not None:
        sys.stderr.write(f"gpucheck: {error}\n")
        return UNUSABLE
    parts = [part for part in _PARTS if part in (arguments.part or _PARTS)]
    with os.fdopen(os.dup(1), "w") as rows:
        report = Report(rows)
        os.dup2(2, 1)  # what the workers and their processes print is not among the rows
        try:
            with Session(tiny=arguments.scale == "tiny", folder=arguments.folder) as session:
                run_parts(session, parts, report)
        finally:
            sys.stdout.flush()
            os.dup2(rows.fileno(), 1)
            sys.stderr.write(report.table() + "\n")
    return report.status
