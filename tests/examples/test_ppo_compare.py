from __future__ import annotations

import dataclasses
import json

import pytest

from examples.ppo.compare import ALGORITHMS, ONE_PROCESS, curve, learning_table, write
from examples.ppo.main import CONFIG
from examples.ppo.off_policy import SETTINGS
from examples.ppo.off_policy import write as write_off_policy
from workers.run.config import read_run_config


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_a_configuration_of_1024_responses_a_step(algorithm):
    config = read_run_config(CONFIG, [*ONE_PROCESS, *ALGORITHMS[algorithm]])
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 1024
    assert config.algorithm.filter_groups.enable == (algorithm == "dapo")


def test_the_table_reports_mean_and_smallest_gain(tmp_path):
    curves = {"grpo": {1: [(0, 0.25), (8, 0.75)], 2: [(0, 0.5), (8, 0.75)]}}
    assert learning_table(curves).splitlines()[-1] == "| `grpo` | 1, 2 | 0.375 | 0.750 | 0.375 | 0.250 |"
    write(curves, tmp_path)
    assert (tmp_path / "img" / "learning.png").stat().st_size > 0 and "0.375" in (tmp_path / "learning.md").read_text()


def test_a_curve_has_the_steps_with_validation(tmp_path):
    records = [
        {"global_step": 0, "held_out/accuracy": 0.5},
        {"global_step": 1, "x": 1.0},
        {"global_step": 2, "held_out/accuracy": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert curve(tmp_path) == [(0, 0.5), (2, 0.75)]


def test_the_runs_on_policy_and_one_step_off_differ_in_the_staleness_alone():
    on_policy, off_policy = (read_run_config(CONFIG, [*ONE_PROCESS, *settings]) for settings in SETTINGS.values())
    assert (on_policy.trainer.max_staleness, off_policy.trainer.max_staleness) == (0, 1)
    same = dataclasses.replace(off_policy.trainer, max_staleness=0)
    assert dataclasses.replace(off_policy, trainer=same) == on_policy
    assert on_policy.rollout == on_policy.actor_rollout_ref


def test_the_page_has_the_accuracy_and_the_seconds_of_both(tmp_path):
    curves = {name: {1: [(0, 0.25), (8, 0.75)]} for name in SETTINGS}
    for number, name in enumerate(SETTINGS):
        records = [{"global_step": step, "timing_s/step": number + 1.5, "timing_s/generate": 0.5} for step in (1, 2)]
        (tmp_path / f"{name}-1").mkdir()
        (tmp_path / f"{name}-1" / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    write_off_policy(curves, tmp_path, tmp_path)
    page = (tmp_path / "learning-off-policy.md").read_text()
    assert "| `max_staleness=1` | 1 | 0.250 | 0.750 |" in page and "| `max_staleness=1` | 2.50 s | 0.50 s |" in page
