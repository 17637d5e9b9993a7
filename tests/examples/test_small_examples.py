"""The small examples, run as a user runs them; the quickstart runs from the wheel in .ci/check-wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples import two_layouts_one_pool, two_roles
from examples.mocked_topology_test import (
    test_every_row_is_returned_by_the_last_stage_of_its_replica as test_every_row_is_returned_by_the_last_stage,
)
from examples.mocked_topology_test import test_the_error_names_the_rank_that_raised

__all__ = ["test_every_row_is_returned_by_the_last_stage", "test_the_error_names_the_rank_that_raised"]

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_a_reward_model_of_pairs_scores_new_ones_and_the_hang_is_explained() -> None:
    program = "from examples import reward_model as r, simulated_hang as s; s.main(); assert r.main() > 0.9"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str([3.0] * 8))
    assert "Deadlock: rank 2 (tp=0 dp=1 pp=0) has ended, and rank 0 waits for it" in done.stdout


def test_a_rollout_in_another_layout_generates_with_the_weights_of_the_actor(
    ray_for_programs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert two_layouts_one_pool.main() > 0.9
    assert " bytes by process_group in " in capsys.readouterr().out


def test_two_roles_in_one_process_train_as_in_two(ray_for_programs: None, capsys: pytest.CaptureFixture[str]) -> None:
    apart, together = two_roles.main()
    assert apart == together
    printed = capsys.readouterr().out
    assert [int(line.split(": ")[1].split()[0]) for line in printed.splitlines() if "processes," in line] == [4, 2]
