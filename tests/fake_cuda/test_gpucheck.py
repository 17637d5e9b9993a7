"""``gpucheck`` runs to its end on pretended GPUs, in processes where they are on from the start, as a real one is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(HERE / "site"), str(HERE.parents[1])])
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    return subprocess.run([sys.executable, "-W", "ignore", *command], env=variables, capture_output=True, text=True)


@pytest.mark.timeout(400)
def test_all_rows_of_gpucheck_are_ok_on_pretended_gpus(tmp_path: Path) -> None:
    written = tmp_path / "rows.json"
    done = run("-m", "workers.gpucheck", "--small", "--json", str(written))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads(written.read_text())["rows"]}
    assert "machine: cuda:1 pretended CUDA device" in rows
    assert rows["placement: experts bfloat16"]["reference"] == "all on cuda, bfloat16"
    assert rows["transfer: changed weights"]["reference"] == "all, by cuda_ipc"
    assert {row["result"] for row in rows.values()} == {"ok", "info"}  # nothing is skipped: there are two GPUs, and Ray
    assert {name.partition(":")[0] for name in rows} >= {"offload", "synchronisations", "transfer", "layouts", "ray"}


UNPLACED = """
import runpy, sys
import workers.model.build
workers.model.build.place_chunks = lambda chunks, device: None
sys.argv = ["gpucheck", "--only", "placement"]
runpy.run_module("workers.gpucheck", run_name="__main__")
"""


def test_a_parameter_left_on_the_cpu_fails_the_run() -> None:
    done = run("-c", UNPLACED, "gpucheck")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout and "cpu" in done.stdout
