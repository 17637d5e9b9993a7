from __future__ import annotations

import json

import pytest

from examples.ppo.compare import ALGORITHMS, ONE_PROCESS, curve, learning_table, write
from examples.ppo.main import CONFIG
from workers.run.config import read_run_config


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_overrides_of_every_algorithm_are_a_configuration_of_1024_responses_a_step(algorithm):
    config = read_run_config(CONFIG, [*ONE_PROCESS, *ALGORITHMS[algorithm]])
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 1024
    assert config.algorithm.filter_groups.enable == (algorithm == "dapo")


def test_the_table_reports_mean_and_smallest_gain(tmp_path):
    curves = {"grpo": {1: [(0, 0.25), (8, 0.75)], 2: [(0, 0.5), (8, 0.75)]}}
    assert learning_table(curves).splitlines()[-1] == "| `grpo` | 1, 2 | 0.375 | 0.750 | 0.375 | 0.250 |"
    write(curves, tmp_path)
    assert (tmp_path / "img" / "learning.png").stat().st_size > 0 and "0.375" in (tmp_path / "learning.md").read_text()


def test_a_curve_has_the_steps_with_validation(tmp_path):
    records = [{"step": 0, "held_out/accuracy": 0.5}, {"step": 1, "x": 1.0}, {"step": 2, "held_out/accuracy": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert curve(tmp_path) == [(0, 0.5), (2, 0.75)]
