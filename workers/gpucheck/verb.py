"""Check GPUs, first of all on a new machine: equality with the CPU, speed and memory, saves, groups on Ray.

Prints a line of JSON for each row as soon as it is known, and at the end a table on standard error. The status is 0 if
no row failed, 1 if one did or nothing was checked, and 2 if there is no GPU that torch can use.

part a: versions, kernels of attention, and scores, tokens, updates and checkpoints against the CPU
part b: peak memory and speed of an update, and of decoding, with a model of the shape of a 1.7B model
part c: offload and reload, save and load, with the same model
part d: groups on Ray: worker processes, two groups on one GPU, engines, NCCL; parts a to c do without Ray

examples: python -m mcontroller gpucheck > rows.jsonl
          python -m mcontroller gpucheck --part a --part b      (needs only torch and megatron-core)
          python -m mcontroller gpucheck --part c --folder /scratch
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from workers.gpucheck import equality, machine, size
from workers.gpucheck.case_run import Session
from workers.gpucheck.machine import gpu_error
from workers.gpucheck.rows import Report, Row, skipped

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
                _run_parts(session, parts, report)
        finally:
            sys.stdout.flush()
            os.dup2(rows.fileno(), 1)
            sys.stderr.write(report.table() + "\n")
    return report.status


_CHECKS: dict[str, tuple[Callable[[Session], Iterator[Row]], ...]] = {
    "a": (machine.versions, equality.attention, equality.equality),
    "b": (size.memory, size.decoding),
    "c": (size.offload, size.saves),
}


def _run_parts(session: Session, parts: Sequence[str], report: Report) -> None:
    """Run the checks of these parts one after another, and add their rows to the report."""
    for part in parts:
        if part == "d":
            _run_on_ray(session, report)
        else:
            _run(session, part, _CHECKS[part], report)


def _run(session: Session, part: str, checks: Sequence[Callable[[Session], Iterator[Row]]], report: Report) -> None:
    for check in checks:
        report.add_all(part, check.__name__, check(session))
        gc.collect()  # modules refer to each other in circles
        torch.cuda.empty_cache()


def _run_on_ray(session: Session, report: Report) -> None:
    """Start Ray on this machine and run part d, unless a package is missing."""
    missing = [name for name in ("ray", "tensordict", "zmq") if find_spec(name) is None]
    if missing:
        report.add_all("d", "Ray", [skipped("Ray", f"{' and '.join(missing)} cannot be imported")])
        return
    import ray

    from workers.gpucheck import groups

    try:
        report.add_all("d", "Ray", groups.local_ray())
        if ray.is_initialized():
            _run(session, "d", (groups.group, groups.colocated, groups.engines, groups.nccl), report)
    finally:
        ray.shutdown()
