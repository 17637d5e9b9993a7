"""The program as a user runs it, on the CPU: with torch and megatron-core alone, and with a fault in the product."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]

WITHOUT_PACKAGES = """
from importlib.machinery import PathFinder
NAMES = {"ray", "tensordict", "transformers", "rich", "omegaconf", "psutil", "safetensors"}
find = PathFinder.find_spec
def found(name, path=None, target=None):
    return None if name.partition(".")[0] in NAMES else find(name, path, target)
PathFinder.find_spec = staticmethod(found)
"""

FAULT = """
import runpy, sys
from workers.actor import ActorRolloutRefWorker
forward_step = ActorRolloutRefWorker.forward_step
ActorRolloutRefWorker.forward_step = lambda *args: forward_step(*args) * 1.01
sys.argv = ["gpucheck", *sys.argv[1:]]
runpy.run_module("workers.gpucheck", run_name="__main__")
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, "-W", "ignore", *command], env=variables, capture_output=True, text=True)


def test_the_smallest_part_needs_only_torch_and_megatron_core(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_PACKAGES)  # in the process of the reference too
    path = f"{tmp_path}{os.pathsep}{CHECKOUT}"
    written = tmp_path / "rows.json"
    options = ["--device", "cpu", "--smallest", "--json", str(written)]
    done = run("-m", "workers.gpucheck", *options, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(written.read_text())
    assert content["status"] == 0
    names = {row["name"] for row in content["rows"] if row["result"] == "ok"}
    assert {"placement: dense float32", "scores: dense float32", "tokens: dense float32 greedy"} <= names


def test_a_fault_in_the_product_fails_its_rows_and_the_run() -> None:
    done = run("-c", FAULT, "--device", "cpu", "--smallest", "--only", "placement", "--only", "scores")
    assert done.returncode == 1, done.stdout + done.stderr
    results = {line.split("  ")[0]: line.split()[-1] for line in done.stdout.splitlines() if ": dense" in line}
    assert results["scores: dense float32"] == "FAILED"
    assert results["placement: dense float32"] == "ok"
