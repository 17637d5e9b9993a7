"""The small examples, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.mocked_topology_test import (
    test_every_row_is_returned_by_the_last_stage_of_its_replica as test_every_row_is_returned_by_the_last_stage,
)
from examples.mocked_topology_test import test_the_error_names_the_rank_that_raised

__all__ = ["test_every_row_is_returned_by_the_last_stage", "test_the_error_names_the_rank_that_raised"]

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_the_quickstart_prints_scores_in_the_order_of_its_rows() -> None:
    done = subprocess.run([sys.executable, "-m", "examples.quickstart"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scorer.score (DP_COMPUTE_PROTO): 4 ranks, 4 shards, 4 return as concat" in done.stdout
    assert "[0.75, 2.75, 4.75, 6.75, 8.75, 10.75]\n[0, 1, 1, 2, 3, 3]\n" in done.stdout


@pytest.mark.processes
def test_a_reward_model_of_pairs_scores_new_ones_and_the_hang_is_explained() -> None:
    program = "from examples import reward_model as r, simulated_hang as s; s.main(); assert r.main() > 0.9"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str([3.0] * 8))
    assert "Deadlock: rank 2 (tp=0 dp=1 pp=0) has ended, and rank 0 waits for it" in done.stdout


@pytest.mark.processes
def test_a_rollout_in_another_layout_generates_with_the_weights_of_the_actor() -> None:
    program = "from examples.two_layouts_one_pool import main; assert main() > 0.9"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "actor (2 ranks) -> rollout (2 ranks) by process_group" in done.stdout
