"""The example as a user runs it: real Megatron ranks, few and small steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from trainer.saving.preemption import PREEMPTED

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SMALL = [
    "data.train.size=300",
    "data.val.size=32",
    "data.train_batch_size=64",
    "warm_up.steps=2",
    "warm_up.batch_size=64",
    "trainer.test_freq=1",
]


def start(*overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "examples.ppo.main", *SMALL, *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def on_the_tests_ray() -> str:
    return f"cluster.address={ray.get_runtime_context().gcs_address}"


@pytest.mark.timeout(300)
def test_a_short_run_leaves_config_metrics_events_curves_and_checkpoint(tmp_path, ray_cluster):
    run = start(f"run_dir={tmp_path}", "trainer.total_training_steps=2", on_the_tests_ray())
    output, _ = run.communicate()
    assert run.returncode == 0, output
    assert "tp 2 x pp 2 x dp 1" in output and "tp 1 x pp 1 x dp 4" in output
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in lines if "held_out/accuracy" in line] == [0, 1, 2]
    assert [line["global_step"] for line in lines if "actor/pg_loss" in line] == [2]  # the critic warms up in step 1
    written = json.loads((tmp_path / "checkpoints" / "trainer.json").read_text())
    assert written["global_steps"] == 2 and set(written["groups"]) == {"actor", "critic"}
    for checkpoint in written["groups"].values():
        assert (tmp_path / "checkpoints" / checkpoint / "manifest.json").is_file()
    assert {"config.yaml", "tokenizer.json", "curves.png", "summary.json"} <= set(os.listdir(tmp_path))
    assert any((tmp_path / "tensorboard").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_every_process_of_the_run(tmp_path):
    run = start(f"run_dir={tmp_path}", "trainer.total_training_steps=100000")
    assert run.stdout is not None
    next(line for line in run.stdout if line.startswith("held-out after 0 steps"))
    processes = psutil.Process(run.pid).children(recursive=True)
    assert len(processes) > 8
    os.killpg(run.pid, signal.SIGINT)
    try:
        output, _ = run.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGABRT)  # faulthandler prints its stacks
        output, _ = run.communicate()
    assert run.returncode == PREEMPTED, output
    assert "SIGINT: " in output and "Traceback" not in output
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
