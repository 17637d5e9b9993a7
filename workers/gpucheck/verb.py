"""Check GPUs, first of all on a new machine: equality with the CPU, memory, FP8, groups on Ray, NCCL.

Prints a line of JSON for each row as soon as it is known, and at the end, on standard error, which rows failed. The
status is 1 if a row failed, or nothing was checked.

part a: versions, and scores, tokens and updates of the parity cases against the CPU
part b: peak memory of an update of a model of 1.7B parameters
part c: FP8, offload and reload, with the same model
part d: groups on Ray: two groups on one GPU, engines; the other parts do without Ray
part e: layouts over NCCL against one process, also with several ranks on one GPU; checkpoints between layouts

examples: python -m mcontroller gpucheck > rows.jsonl
          python -m mcontroller gpucheck --part a --part b      (needs no Ray)
          python -m mcontroller gpucheck --part d --vllm-python /opt/vllm/bin/python
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from mcontroller.cli.doctor import versions
from mcontroller.devices import torch_without_gpu
from workers.gpucheck import equality, size
from workers.gpucheck.rows import SKIPPED, Run
from workers.gpucheck.scale import FULL, GB, TINY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("--part", action="append", choices="abcde", help="run only this part; may be repeated")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="tiny: the smallest sizes")
    parser.add_argument("--vllm-python", default=sys.executable, help="the interpreter of vLLM; default: this one")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the rows and the summary, and return the exit status.

    Raises:
        ResourceError: torch can use no GPU.
    """
    if not torch.cuda.is_available():
        raise torch_without_gpu()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what workers, their processes and NCCL print is not among the rows
    actor = FULL if arguments.scale == "full" else TINY
    with output, tempfile.TemporaryDirectory(prefix="gpucheck") as folder:
        checked = Run(output, actor, Path(folder), arguments.vllm_python)
        for checked.part in sorted(set(arguments.part or _PARTS)):
            for check in _PARTS[checked.part]:
                check(checked)
                gc.collect()  # modules refer to each other in circles
                torch.cuda.empty_cache()
    sys.stderr.write(checked.summary() + "\n")
    return checked.status


def _machine(run: Run) -> None:
    """Write the versions of the packages, and the GPUs with their memory."""
    with run.row("versions") as figures:
        figures |= versions()
        for index in range(torch.cuda.device_count()):
            free, total = (memory / GB for memory in torch.cuda.mem_get_info(index))
            figures[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)}, {free:.1f} of {total:.1f} GB free"


def _groups(run: Run) -> None:
    """Run part d if Ray is installed."""
    if find_spec("ray") is None:
        run.write(SKIPPED, "groups", reason="ray cannot be imported")
        return
    from workers.gpucheck import groups

    groups.check(run)


_PARTS: dict[str, Sequence[Callable[[Run], None]]] = {
    "a": (_machine, equality.parity),
    "b": (size.memory,),
    "c": [partial(size.precision, recipe=recipe) for recipe in size.PRECISIONS],
    "d": (_groups,),
    "e": (equality.layouts,),
}
