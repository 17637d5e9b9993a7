"""The small examples, run as a user runs them; the quickstart runs from the wheel in .ci/check-wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray

from examples.mocked_topology_test import (
    test_every_row_is_returned_by_the_last_stage_of_its_replica as test_every_row_is_returned_by_the_last_stage,
)
from examples.mocked_topology_test import test_the_error_names_the_rank_that_raised

__all__ = ["test_every_row_is_returned_by_the_last_stage", "test_the_error_names_the_rank_that_raised"]

ROOT = Path(__file__).parents[2]
ON_RAY = "import ray; ray.init({!r}, log_to_driver=False); ray.init = lambda *_, **__: None; "
"""Makes a program run on the Ray of this address in place of one that it starts."""


@pytest.mark.processes
def test_a_reward_model_of_pairs_scores_new_ones_and_the_hang_is_explained() -> None:
    program = "from examples import reward_model as r, simulated_hang as s; s.main(); assert r.main() > 0.9"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str([3.0] * 8))
    assert "Deadlock: rank 2 (tp=0 dp=1 pp=0) has ended, and rank 0 waits for it" in done.stdout


@pytest.mark.processes
def test_a_rollout_in_another_layout_generates_with_the_weights_of_the_actor(ray_cluster: None) -> None:
    start = ON_RAY.format(ray.get_runtime_context().gcs_address)
    program = f"{start}from examples.two_layouts_one_pool import main; assert main() > 0.9"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "actor (2 ranks) -> rollout (2 ranks) by process_group" in done.stdout


@pytest.mark.processes
def test_two_roles_in_one_process_train_as_in_two(ray_cluster: None) -> None:
    start = ON_RAY.format(ray.get_runtime_context().gcs_address)
    program = f"{start}from examples.two_roles import main; one, other = main(); assert one == other"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [int(line.split(": ")[1].split()[0]) for line in done.stdout.splitlines() if "processes," in line] == [4, 2]
