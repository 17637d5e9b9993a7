"""Check GPUs, first of all on a new machine: equality with the CPU, memory, saves, groups on Ray, NCCL.

Prints a line of JSON for each row as soon as it is known, and at the end, on standard error, which rows failed. The
status is 0 if no row failed, 1 if one did or nothing was checked, and 2 if there is no GPU that torch can use.

part a: versions, and scores, tokens and updates of the parity cases against the CPU
part b: peak memory and speed of an update of a model of 1.7B parameters
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
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import torch

from mcontroller.cli.doctor import versions
from mcontroller.devices import why_torch_has_no_gpu
from workers.gpucheck import equality, size
from workers.gpucheck.report import Report
from workers.gpucheck.scale import FULL, GB, TINY, Session

UNUSABLE = 2
"""Exit status if there is no GPU, or an argument is wrong."""
Check = Callable[[Session], None]
"""Writes rows to the report of a session."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("--part", action="append", choices="abcde", help="run only this part; may be repeated")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="tiny: the smallest sizes")
    parser.add_argument("--vllm-python", default=sys.executable, help="the interpreter of vLLM; default: this one")
    parser.add_argument(
        "--folder", type=Path, help="where part c saves about 30 GB; default: the directory of temporary files"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the rows and the summary, and return the exit status."""
    if not torch.cuda.is_available():
        sys.stderr.write(
            f"gpucheck: torch {torch.__version__} for CUDA {torch.version.cuda} can use no GPU: "
            f"{why_torch_has_no_gpu()}: install a build for the CUDA version that nvidia-smi prints, or change "
            f"CUDA_VISIBLE_DEVICES, which is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r}\n"
        )
        return UNUSABLE
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what workers, their processes and NCCL print is not among the rows
    report = Report(output)
    with output, tempfile.TemporaryDirectory(prefix="gpucheck", dir=arguments.folder) as folder:
        scale = FULL if arguments.scale == "full" else TINY
        session = Session(report, scale, Path(folder), arguments.vllm_python)
        for part in sorted(set(arguments.part or "abcde")):
            report.part = part
            _run(_PARTS[part], session)
    sys.stderr.write(report.summary() + "\n")
    return report.status


def _run(checks: Iterable[Check], session: Session) -> None:
    """Run checks one after another; the others still run after one that raises outside of its rows."""
    for check in checks:
        try:
            check(session)
        except Exception as error:
            with session.report.row(check.__name__):
                raise error
        gc.collect()  # modules refer to each other in circles
        torch.cuda.empty_cache()


def _machine(session: Session) -> None:
    """Look at the packages and the GPUs."""
    with session.report.row("versions") as figures:
        figures |= versions()
    for index in range(torch.cuda.device_count()):
        with session.report.row(f"cuda:{index}", {"used": 0.1}) as figures:
            major, minor = torch.cuda.get_device_capability(index)
            free, total = torch.cuda.mem_get_info(index)
            figures |= {"gpu": torch.cuda.get_device_name(index), "capability": f"{major}.{minor}"}
            figures |= {"free_gb": free / GB, "used": 1 - free / total}


def _groups(session: Session) -> None:
    """Run the checks of groups on a Ray cluster of this machine."""
    if find_spec("ray") is None:
        session.report.skip("groups", "ray cannot be imported")
        return
    from workers.gpucheck import groups

    with groups.local_ray():
        _run(groups.CHECKS, session)


_PARTS: dict[str, tuple[Check, ...]] = {
    "a": (_machine, equality.parity),
    "b": (size.memory,),
    "c": (size.precisions, size.saves),
    "d": (_groups,),
    "e": (equality.layouts,),
}
