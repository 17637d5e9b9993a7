"""``gpucheck`` runs to its end on fake CUDA devices, which every process has from its start on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
FAKE_CUDA = """
import os
import sys
from importlib.machinery import PathFinder
NAMES = {blocked}
find = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in NAMES else find(name, path, target)
PathFinder.find_spec = staticmethod(find_spec)
words, gpus = " ".join(sys.orig_argv), os.environ.get("CUDA_VISIBLE_DEVICES")
if gpus and any(word in words for word in ("warm_start", "gpucheck", "spawn_main")):  # not in Ray's processes
    import tests.fake_cuda.plugin
    {fault}
"""
WITHOUT_RAY = {"ray", "psutil", "transformers", "zmq", "rich", "omegaconf", "yaml", "safetensors"}
FAULT = """
    from workers.actor import ActorRolloutRefWorker
    forward_step = ActorRolloutRefWorker.forward_step
    ActorRolloutRefWorker.forward_step = lambda *args: forward_step(*args) * 1.01
"""


def start(
    folder: Path, *command: str, gpus: str = "0", blocked: set[str] | None = None, fault: str = ""
) -> subprocess.Popen[str]:
    """Start Python with the fake CUDA device, without the packages that are blocked."""
    (folder / "sitecustomize.py").write_text(FAKE_CUDA.format(blocked=blocked or set(), fault=fault))
    path = os.pathsep.join([str(folder), str(HERE.parents[1])])
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": gpus}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *command],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rows_of(process: subprocess.Popen[str], status: int) -> dict[str, dict[str, Any]]:
    """Wait for the end, and return the rows by name."""
    out, err = process.communicate()
    assert process.returncode == status, out + err
    rows = [json.loads(line) for line in out.splitlines()]
    return {row["name"]: row for row in rows}


PARTS = ["-m", "mcontroller", "gpucheck", "--scale", "tiny", "--part"]


@pytest.mark.timeout(300)
def test_parts_a_to_c_need_no_ray(tmp_path: Path) -> None:
    options = [*PARTS, "a", "--part", "b", "--part", "c"]
    rows = rows_of(start(tmp_path, *options, blocked=WITHOUT_RAY), 0)
    assert {row["result"] for row in rows.values()} == {"passed"}
    assert {row["part"] for row in rows.values()} == {"a", "b", "c"}
    figures = rows["dense float32 local"]["figures"]
    assert 0 < figures["scores"] < 1e-5 and figures["greedy"] == 0
    assert rows["update in bfloat16"]["figures"]["changed by reload"] == 0.0
    assert rows["update"]["figures"]["seconds"] > 0
    assert {"dense bfloat16 local", "offload and reload 3 in bfloat16"} <= rows.keys()


def test_a_fault_in_the_product_fails_its_row_and_a_killed_run_keeps_the_rows_that_it_has(tmp_path: Path) -> None:
    process = start(tmp_path, *PARTS, "a", fault=FAULT)
    assert process.stdout is not None
    results = {}
    for row in map(json.loads, process.stdout):
        results[row["name"]] = row["result"]
        if row["name"] == "dense float32 local":
            break
    process.kill()
    process.communicate(timeout=60)  # its ranks, which have the same output, end too
    assert results["versions"] == "passed" and results["dense float32 local"] == "failed"


PLAIN_STEP = """
import json
from benchmarks.parts.train_step_gpu import compare
from workers.gpucheck.scale import TINY
print(json.dumps(compare(TINY)))
"""


def test_a_training_step_on_a_gpu_is_that_of_the_plain_loop(tmp_path: Path) -> None:
    out, err = start(tmp_path, "-c", PLAIN_STEP, blocked=WITHOUT_RAY).communicate()
    figures = json.loads(out.splitlines()[-1])  # it exits without figures if losses or norms differ
    assert figures["of_plain"] == pytest.approx(figures["seconds"] / figures["plain_s"]), err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_groups_on_fake_cuda_devices_pass_every_row(tmp_path: Path) -> None:
    rows = rows_of(start(tmp_path, *PARTS, "d", gpus="0,1"), 0)
    skipped = {name for name, row in rows.items() if row["result"] == "skipped"}
    assert skipped <= {"vllm"}
    for name in ("megatron", "megatron, experts replayed"):
        figures = rows[name]["figures"]
        assert figures["rows_changed_by_sleep"] == 0 and figures["log_prob_difference"] < 1e-2
    for name in ("weights by cuda_ipc, SIGKILL", "weights by process_group, SIGSTOP"):
        figures = rows[name]["figures"]
        assert "rollout rank 0" in figures["reported"] and figures["update_s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_layouts_equal_one_process_in_processes_of_their_own(tmp_path: Path) -> None:
    rows = rows_of(start(tmp_path, *PARTS, "e", blocked=WITHOUT_RAY), 0)
    assert 0 < rows["TP2 float32"]["figures"]["gradient norm"] <= 1e-5
    assert rows["DP2, distributed optimizer bfloat16, read by DP2, distributed optimizer"]["figures"]["scores"] == 0
    assert len(rows) == 5  # a layout in every dtype, and three checkpoints
