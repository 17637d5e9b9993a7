"""The CPU reference, computed in a process of its own.

The process is a new interpreter with an empty CUDA_VISIBLE_DEVICES: it never sees a GPU, and nothing is forked after
CUDA was used. ``python -m workers.gpucheck.reference FOLDER course|continue CASES`` writes its results to the folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mcontroller.errors import ResourceError
from workers.gpucheck.course import Case, continue_course, run_course

__all__ = ["CpuProcess", "checkpoint_of", "compute_reference"]

_RESULTS, _TIMEOUT_S = "results.pt", 240.0


class CpuProcess:
    """A process on the CPU that computes while the device works.

    Args:
        folder: an empty folder for its results; for ``continue`` one with a checkpoint.
        task: ``course`` (see ``run_course``) or ``continue`` (see ``continue_course``).
        cases: what to compute.
    """

    def __init__(self, folder: Path, task: str, cases: Sequence[Case]) -> None:
        self.folder = folder
        self._log = folder / f"{task}.log"
        command = [sys.executable, "-m", "workers.gpucheck.reference", str(folder), task]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, json.dumps([asdict(case) for case in cases])],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def results(self) -> dict[Case, Any]:
        """Wait for the process and return the result of every case.

        Raises:
            ResourceError: the process failed, or did not end in four minutes.
        """
        try:
            status = self._process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.end()
            status = None
        if status != 0:
            lines = self._log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
            ending = f"did not end in {_TIMEOUT_S:g} s" if status is None else f"ended with status {status}"
            raise ResourceError(f"the CPU reference {ending}: {lines[-1]}", status=status, log=lines)
        return torch.load(self.folder / _RESULTS, weights_only=False)

    def end(self) -> None:
        """Kill the process if it runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def checkpoint_of(folder: Path, case: Case) -> Path:
    """Return the path of the checkpoint of a case in a folder of results."""
    return folder / f"checkpoint of {case}".replace(" ", "_")


def compute_reference(arguments: Sequence[str]) -> None:
    """Compute a task and write its results: the program of the process."""
    folder, task = Path(arguments[0]), arguments[1]
    cases = [Case(**fields) for fields in json.loads(arguments[2])]
    results: dict[Case, object] = {}
    for case in cases:
        path = checkpoint_of(folder, case)
        results[case] = (run_course if task == "course" else continue_course)(case, path)
    torch.save(results, folder / _RESULTS)


if __name__ == "__main__":
    compute_reference(sys.argv[1:])
