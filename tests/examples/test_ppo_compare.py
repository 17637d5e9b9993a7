from __future__ import annotations

import dataclasses
import json

import pytest

from examples.ppo.compare import ALGORITHMS, ONE_PROCESS, curve, draw, learning_table
from examples.ppo.main import CONFIG
from examples.ppo.off_policy import SETTINGS, table
from trainer.run.config import read_run_config


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_a_configuration_of_1024_responses_a_step(algorithm):
    config = read_run_config(CONFIG, [*ONE_PROCESS, *ALGORITHMS[algorithm]])
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 1024
    assert config.algorithm.filter_groups.enable == (algorithm == "dapo")


def test_the_table_reports_mean_and_smallest_gain(tmp_path):
    curves = {"grpo": {1: [(0, 0.25), (8, 0.75)], 2: [(0, 0.5), (8, 0.75)]}}
    assert learning_table(curves).splitlines()[-1] == "| `grpo` | 1, 2 | 0.375 | 0.750 | 0.375 | 0.250 |"
    draw(curves, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 0


def test_a_curve_has_the_steps_with_validation(tmp_path):
    records = [
        {"global_step": 0, "held_out/accuracy": 0.5},
        {"global_step": 1, "x": 1.0},
        {"global_step": 2, "held_out/accuracy": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert curve(tmp_path) == [(0, 0.5), (2, 0.75)]


def test_the_runs_on_and_off_policy_differ_in_the_staleness_alone():
    on_policy, *others = (read_run_config(CONFIG, [*ONE_PROCESS, *settings]) for settings in SETTINGS.values())
    assert [config.trainer.max_staleness for config in (on_policy, *others)] == [0, 1, 2, 2, 2, 4, 4, 4]
    changed = {"max_staleness": 0, "asynchronous": on_policy.trainer.asynchronous}
    for config in others:
        assert dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, **changed)) == on_policy
    assert on_policy.rollout == on_policy.actor_rollout_ref


def test_the_table_has_the_accuracy_and_the_staleness_of_every_setting(tmp_path):
    curves = {name: {seed: [(0, 0.25), (8, 0.5 + seed / 100)] for seed in (1, 2)} for name in SETTINGS}
    for number, name in enumerate(SETTINGS):
        for seed in (1, 2):
            records = [{"global_step": 1, **({"training/staleness_mean": number + seed} if number else {})}]
            (tmp_path / f"{name}-{seed}").mkdir()
            (tmp_path / f"{name}-{seed}" / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    lines = table(curves, tmp_path)
    assert "| `max_staleness=0` | 0.00 | 0.250 | 0.515 | +0.000 | 1: 0.510, 2: 0.520 |" in lines
    assert "| `max_staleness=1` | 2.50 | 0.250 | 0.515 | +0.000 | 1: 0.510, 2: 0.520 |" in lines
