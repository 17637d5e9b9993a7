"""Values of one metric that meet have a rule, and no metric overwrites another."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mcontroller.data.batch import DataProto
from mcontroller.data.meta import united
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError, DataError
from tests.trainer.sliced import sliced_config, sliced_trainer
from tests.trainer.toy import ToyActor, next_letter, toy_config, toy_trainer
from trainer import AlgorithmConfig, FilterGroupsConfig, PPOConfig, Reward, RewardsConfig, Role
from trainer.metrics import METRIC_RULES, MetricRule, Metrics, over_ranks, rule_of
from trainer.rewards.config import RewardFunctionConfig
from trainer.rewards.reward import rewarded
from trainer.rollout.trajectory_log import TrajectoryLog, read


class Log:
    """A tracker that keeps the metrics of training."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, metrics: Any, step: int, phase: str) -> None:
        self.steps.append(dict(metrics))

    def log_samples(self, samples: Any, step: int) -> None: ...

    def close(self) -> None: ...


class Counted(ToyActor):
    """A policy that answers twice, and reports the number of its call in several metrics."""

    calls = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        prompts.meta_info.setdefault("n", 2)
        batch = super().generate_sequences(prompts)
        self.calls += 1
        names = (
            "episodes/failed",
            "multi_turn/turns_mean",
            "multi_turn/turns_max",
            "mine/length_min",
            "rollout/seconds",
        )
        batch.meta_info["metrics"] = dict.fromkeys(names, float(self.calls))
        return batch


def run_of_draws(reward_fn: Any = next_letter, **others: Any) -> Any:
    algorithm = AlgorithmConfig(adv_estimator="grpo", filter_groups=FilterGroupsConfig(enable=True, max_batches=4))
    config: PPOConfig = dataclasses.replace(toy_config(1, test_freq=-1, val_before_train=False), algorithm=algorithm)
    return toy_trainer(config, {Role.ActorRolloutRef: Counted}, reward_fn=reward_fn, **others)


def test_metrics_of_a_step_are_those_of_all_its_draws() -> None:
    log = Log()
    with run_of_draws(trackers=[log]) as trainer:
        trainer.init_workers()
        trainer.fit()
    (step,) = log.steps
    assert step["dynamic_sampling/batches"] == 4
    assert (step["episodes/failed"], step["rollout/seconds"]) == (1 + 2 + 3 + 4, 1 + 2 + 3 + 4)
    assert (step["multi_turn/turns_mean"], step["multi_turn/turns_max"], step["mine/length_min"]) == (2.5, 4, 1)


def test_groups_dropped_by_an_early_draw_are_counted(tmp_path: Path) -> None:
    """Groups become stale when the weights move, before the first draw of a step: the last draw has dropped none."""
    config = sliced_config(8, tmp_path, stale="drop", partial="stop", seed=0)
    filtered = FilterGroupsConfig(enable=True, max_batches=3)
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, filter_groups=filtered))
    trainer, steps = sliced_trainer(config)
    with trainer:
        trainer.fit()
    record = [read(path) for path in TrajectoryLog(tmp_path, resumes=True).files()]
    assert max(step["dynamic_sampling/batches"] for step in steps) > 1
    dropped = sum(len(taken.dropped) for taken in record)
    assert sum(step["asynchronous/dropped_groups"] for step in steps) == dropped > 0
    tokens = sum(taken.dropped_tokens for taken in record)
    assert sum(step["asynchronous/dropped_tokens"] for step in steps) == tokens
    assert all(0 <= step["asynchronous/trainer_waited"] <= 1 for step in steps)


def test_validation_reports_what_its_generation_reported() -> None:
    with run_of_draws() as trainer:
        trainer.init_workers()
        data = dataclasses.replace(trainer.config.data, val_batch_size=4)
        trainer.step.config = dataclasses.replace(trainer.config, data=data)
        metrics = trainer.validate()  # of batches of 4, 4 and 2 problems
    assert metrics["validation/episodes/failed"] == 1 + 2 + 3
    assert metrics["validation/multi_turn/turns_mean"] == pytest.approx((4 * 1 + 4 * 2 + 2 * 3) / 10)
    assert metrics["validation/multi_turn/turns_max"] == 3


def test_each_rule_reduces_values_by_hand() -> None:
    METRIC_RULES.add("test_metrics/count", MetricRule.SUM)
    metrics = Metrics()
    metrics.add({"memory/actor/update/peak": 3.0, "test_metrics/count": 3.0, "x_min": 2.0, "x": 1.0}, weight=1)
    metrics.add({"memory/actor/update/peak": 2.0, "test_metrics/count": 4.0, "x_min": 5.0, "x": 4.0}, weight=2)
    metrics.add({"weights/policy_version": 8.0, "y_max": 1.0})
    metrics.add({"weights/policy_version": 7.0, "y_max": 0.0})
    expected = {"memory/actor/update/peak": 3, "test_metrics/count": 7, "x_min": 2, "x": 3}
    assert metrics.take() == expected | {"weights/policy_version": 8, "y_max": 1}
    assert metrics.take() == {}
    assert rule_of("episodes/timeout") is rule_of("weights/bytes_sent") is MetricRule.SUM


def test_equal_numbers_of_ranks_are_not_added() -> None:
    metrics = {
        "episodes/failed": [3.0, 3.0],
        "actor/ratio_max": [1.0, 4.0],
        "a_min": [2.0, 1.0],
        "b": [1.0, 2.0],
        "c": 5,
    }
    assert over_ranks(metrics) == {"episodes/failed": 3.0, "actor/ratio_max": 4.0, "a_min": 1.0, "b": 1.5, "c": 5.0}


def test_a_metric_of_two_sources_is_an_error_of_both_values() -> None:
    assert united({"a": 1.0}, {}, {"b": 2.0}) == {"a": 1.0, "b": 2.0}
    with pytest.raises(DataError) as caught:
        united({"train/score": 1.0}, {"train/score": 9.0})
    assert caught.value.fields["metric"] == "train/score" and caught.value.fields["values"] == (1.0, 9.0)


TAKEN = (
    "score score_max unscored epoch n frac_reward_zero_std frac_reward_zero best_at_4 overlong_penalty right,right_std"
)


@pytest.mark.parametrize("columns", [names.split(",") for names in TAKEN.split()])
def test_a_column_of_a_reward_does_not_overwrite_a_metric(columns: list[str]) -> None:
    with run_of_draws() as trainer:
        trainer.init_workers()
        batch = trainer.step.generate(trainer.draw()).responses
        reward = Reward(batch.batch["response_mask"].float(), {name: [9.0] * len(batch) for name in columns})
        with pytest.raises(DataError) as caught:
            rewarded(lambda batch: reward, batch)
    assert caught.value.fields["column"] in columns


@pytest.mark.parametrize(
    "name", ["score", "unscored", "num_tokens", "prompt", "reward_failed", "model_score", "tokens"]
)
def test_a_reward_function_with_the_name_of_a_metric_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RewardsConfig({name: RewardFunctionConfig("math:sqrt")})
    assert caught.value.fields["value"] == name


def test_reward_functions_whose_metrics_collide_are_rejected() -> None:
    right = RewardFunctionConfig("math:sqrt")
    with pytest.raises(ConfigError):
        RewardsConfig({"right": right, "right_std": right})
