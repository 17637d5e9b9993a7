from __future__ import annotations

import dataclasses

import pytest

from examples.ppo.compare import ALGORITHMS, ONE_PROCESS
from examples.ppo.main import CONFIG
from examples.ppo.off_policy import SETTINGS
from trainer.run.config import read_run_config


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_a_configuration_of_1024_responses_a_step(algorithm):
    config = read_run_config(CONFIG, [*ONE_PROCESS, *ALGORITHMS[algorithm]])
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 1024
    assert config.algorithm.filter_groups.enable == (algorithm == "dapo")


def test_the_runs_on_and_off_policy_differ_in_the_staleness_alone():
    on_policy, *others = (read_run_config(CONFIG, [*ONE_PROCESS, *settings]) for settings in SETTINGS.values())
    assert [config.trainer.max_staleness for config in (on_policy, *others)] == [0, 1, 2, 2, 2, 4, 4, 4]
    changed = {"max_staleness": 0, "asynchronous": on_policy.trainer.asynchronous}
    for config in others:
        assert dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, **changed)) == on_policy
    assert on_policy.rollout == on_policy.actor_rollout_ref
