"""One step off policy from the command line: actor and rollout in separate pools on Ray."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[3]
VERBS = """
import sys
from mcontroller.cli.main import main

small = ["trackers=[jsonl]", "warm_up.steps=0", "actor_rollout_ref.sft_optim=null"]
small += ["trainer.val_before_train=false", "trainer.test_freq=-1"]
small += ["data.train.size=300", "data.val.size=32", "data.train_batch_size=16", "rewards.processes=1"]
small += ["ref.model=${actor_rollout_ref.model}", "pools.rollout.roles=[rollout, ref]"]
small += ["trainer.total_training_steps=2", "run_dir=" + sys.argv[1], "cluster.address=" + sys.argv[2]]
sys.exit(main(["train", "examples/ppo/one_step_off.yaml", *small]))
"""


def metrics(run: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["global_step"]: line[name] for line in lines if name in line}


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_rollout_in_its_own_pool_generates_ahead(tmp_path: Path, ray_cluster: None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", VERBS, str(tmp_path), ray.get_runtime_context().gcs_address]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"COLUMNS": "200"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert metrics(tmp_path, "training/staleness_mean") == {1: 0.0, 2: 1.0}

    cores = len(os.sched_getaffinity(0))
    rows = re.findall(r"^│ (actor|rollout|ref) .* │ 1 on 1 node +│ (\d+) ", done.stdout, re.MULTILINE)
    assert {name for name, _ in rows} == {"actor", "rollout", "ref"}
    assert {int(threads) for _, threads in rows} == {max(1, cores // 2)}  # two pools of one bundle on one node
