"""Check GPUs, first of all on a new machine: equality with the CPU, speed and memory, saves, groups on Ray, NCCL.

Prints a line of JSON for each row as soon as it is known, and at the end a table on standard error. The status is 0 if
no row failed, 1 if one did or nothing was checked, and 2 if there is no GPU that torch can use.

part a: versions, and scores, tokens and updates of the parity cases against the CPU
part b: peak memory and speed of an update, beside Megatron alone, with a model of 1.7B parameters
part c: FP8, offload and reload, save and load, with the same model
part d: groups on Ray: worker processes, two groups on one GPU, engines, NCCL; the other parts do without Ray
part e: layouts over NCCL against one process, also with several ranks on one GPU; checkpoints between layouts

examples: python -m mcontroller gpucheck > rows.jsonl
          python -m mcontroller gpucheck --part a --part b      (needs no Ray)
          python -m mcontroller gpucheck --part c --folder /scratch
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch

from workers.gpucheck import equality, machine, size
from workers.gpucheck.rows import Report, Row
from workers.gpucheck.scale import Session

UNUSABLE = 2
"""Exit status if there is no GPU, or an argument is wrong."""
_CHECKS = {
    "a": (machine.versions, equality.parity),
    "b": (size.memory,),
    "c": (size.precisions, size.saves),
    "e": (equality.layouts,),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("--part", action="append", choices="abcde", help="run only this part; may be repeated")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="tiny: the smallest sizes")
    parser.add_argument("--vllm-python", default=sys.executable, help="the interpreter of vLLM; default: this one")
    parser.add_argument(
        "--folder", type=Path, help="where part c saves about 30 GB; default: the directory of temporary files"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the rows and the table, and return the exit status."""
    if error := machine.gpu_error():
        sys.stderr.write(f"gpucheck: {error}\n")
        return UNUSABLE
    with (
        os.fdopen(os.dup(1), "w") as rows,
        tempfile.TemporaryDirectory(prefix="gpucheck", dir=arguments.folder) as folder,
    ):
        report = Report(rows)
        os.dup2(2, 1)  # what the workers and their processes print is not among the rows
        try:
            session = Session(arguments.scale == "tiny", Path(folder), arguments.vllm_python)
            for part in sorted(set(arguments.part or "abcde")):
                _run_part(part, session, report)
        finally:
            sys.stdout.flush()
            os.dup2(rows.fileno(), 1)
            sys.stderr.write(report.table() + "\n")
    return report.status


def _run_part(part: str, session: Session, report: Report) -> None:
    """Run the checks of a part one after another; Ray runs during part d."""
    checks: Iterable[Callable[[Session], Iterator[Row]]] = _CHECKS.get(part, ())
    running: AbstractContextManager[None] = nullcontext()
    if part == "d":
        if missing := [name for name in ("ray", "zmq") if find_spec(name) is None]:
            reason = f"{' and '.join(missing)} cannot be imported"
            report.add_all(part, "Ray", [Row("Ray", {"error": reason}, is_skipped=True)])
            return
        from workers.gpucheck import groups

        checks, running = groups.CHECKS, groups.local_ray()
    with running:
        for check in checks:
            report.add_all(part, check.__name__, check(session))
            gc.collect()  # modules refer to each other in circles
            torch.cuda.empty_cache()
