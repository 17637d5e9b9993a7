"""One step off policy: the order of calls, the staleness of rows, and the settings that are rejected."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError, DataError, WorkerError
from mcontroller.ray import ResourcePoolManager
from tests.trainer.separate import SEPARATE, SeparateActor
from tests.trainer.toy import CALLS, ToyActor, ToyCritic, problems, toy_config, toy_trainer
from trainer import (
    AlgorithmConfig,
    AsynchronousConfig,
    Callback,
    FilterGroupsConfig,
    ImportanceConfig,
    PPOConfig,
    RayPPOTrainer,
    Role,
    TrainerConfig,
)

TOKEN = ImportanceConfig(level="token")
SEEN = ("transfer", "generate_sequences", "update_actor")


def off_policy(steps: int, algorithm: AlgorithmConfig | None = None, **trainer: Any) -> PPOConfig:
    config = toy_config(steps, **{"max_staleness": 1, "val_before_train": False, **trainer})
    rule = algorithm or dataclasses.replace(config.algorithm, importance=TOKEN)
    return dataclasses.replace(config, rollout=0.5, ref=0.5, algorithm=rule)


class Versions(Callback):
    """Records the versions of the policy that generated each batch."""

    def __init__(self) -> None:
        self.of_batches: list[list[int]] = []

    def batch_ready(self, trainer: Any, batch: DataProto) -> None:
        self.of_batches.append(batch.batch["policy_version"].unique().tolist())


def run(config: PPOConfig, roles: dict[Role, Any] = SEPARATE, **others: Any) -> tuple[RayPPOTrainer, list[dict]]:
    """Return a trainer after its run, and the metrics of every step."""
    lines: list[dict[str, float]] = []
    tracker = type("Lines", (), {"log": lambda self, metrics, *_: lines.append(dict(metrics)), "close": print})()
    tracker.log_samples = lambda *_: None
    trainer = toy_trainer(config, roles, trackers=[tracker], **{"val_dataset": None, **others})
    trainer.init_workers()
    CALLS.clear()
    trainer.fit()
    return trainer, lines


def test_a_batch_is_generated_with_the_weights_before_the_update_beside_it() -> None:
    versions = Versions()
    _, lines = run(off_policy(4), callbacks=[versions])
    step = ["update_actor", "transfer", "generate_sequences"]
    begin = ["transfer", "generate_sequences", "generate_sequences"]  # the batch of step 1, and the one in flight
    assert [call for call in CALLS if call in SEEN] == [*begin, *step * 3, "update_actor"]
    assert versions.of_batches == [[0], [0], [1], [2]]
    assert [line["training/staleness_mean"] for line in lines] == [0.0, 1.0, 1.0, 1.0]
    assert [line["training/staleness_max"] for line in lines] == [0.0, 1.0, 1.0, 1.0]
    limited = [line["training/rollout_kl"] for line in lines]
    assert limited[0] == 0.0 and all(value != 0.0 for value in limited[1:])
    assert [line["train/epoch"] for line in lines] == [0.5, 1.0, 1.5, 2.0]


def test_without_staleness_groups_of_their_own_equal_one_group() -> None:
    together = {Role.ActorRollout: WithLogProbs, Role.RefPolicy: ToyActor, Role.Critic: ToyCritic}
    one, of_one = run(dataclasses.replace(off_policy(5, max_staleness=0), rollout=None), together)
    two, of_two = run(off_policy(5, max_staleness=0))
    assert one.actor.workers[0].table.equal(two.actor.workers[0].table)
    assert comparable(of_one) == comparable(of_two)
    ahead, _ = run(off_policy(5))
    assert not one.actor.workers[0].table.equal(ahead.actor.workers[0].table)


def test_a_replay_one_step_off_is_the_same_run_again() -> None:
    replay = AsynchronousConfig(replay="run")
    once, lines = run(off_policy(5))
    again, repeated = run(off_policy(5, asynchronous=replay))
    assert again.actor.workers[0].table.equal(once.actor.workers[0].table)
    assert comparable(repeated) == comparable(lines)
    with pytest.raises(ConfigError) as caught:
        off_policy(5, max_staleness=0, asynchronous=replay)
    assert (caught.value.key, caught.value.value) == ("trainer.asynchronous.replay", "run")


class WithLogProbs(ToyActor):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        generated = super().generate_sequences(prompts)
        return generated.with_tensors({"rollout_log_probs": self._log_probs(self.table, generated)})


def comparable(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """The metrics that do not depend on the machine or on the transfer of weights."""
    return [
        {name: value for name, value in line.items() if name.split("/")[0] not in ("timing_s", "perf", "weights")}
        for line in lines
    ]


def test_dynamic_sampling_draws_from_the_batches_in_flight() -> None:
    """A step that draws again takes the batch that it has started itself, whose policy is the newest."""
    rule = AlgorithmConfig(
        adv_estimator="rloo",
        use_kl_in_reward=False,
        importance=TOKEN,
        filter_groups=FilterGroupsConfig(enable=True, max_batches=3),
    )
    versions = Versions()
    trainer, lines = run(off_policy(6, rule), {**SEPARATE, Role.Rollout: Twice}, callbacks=[versions])
    assert max(line["dynamic_sampling/batches"] for line in lines) > 1
    for step, generated_by in enumerate(versions.of_batches[1:], 1):
        assert set(generated_by) <= {step - 1, step}
    assert all(0.0 <= line["training/staleness_mean"] <= line["training/staleness_max"] <= 1.0 for line in lines)
    assert trainer.problems.count == 1 + sum(line["dynamic_sampling/batches"] for line in lines)


class Twice(SeparateActor):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        prompts.meta_info["n"] = 2
        return super().generate_sequences(prompts)


def test_validation_generates_with_the_newest_weights_between_the_batches() -> None:
    without, _ = run(off_policy(3))
    trainer, _ = run(off_policy(3, test_freq=1), val_dataset=problems(8))
    one = ["update_actor", "transfer", "generate_sequences"]  # validation; then the next batch, with the same weights
    begin = ["transfer", "generate_sequences", "generate_sequences"]
    assert [call for call in CALLS if call in SEEN] == [*begin, *[*one, "generate_sequences"] * 2, *one]
    assert trainer.step.weights.version == 3
    assert trainer.actor.workers[0].table.equal(without.actor.workers[0].table)


def test_an_error_of_the_generation_in_flight_is_raised_where_it_is_needed() -> None:
    class Failing(SeparateActor):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
        def generate_sequences(self, prompts: DataProto) -> DataProto:
            if self.version == 1:
                raise ValueError("out of memory")
            return super().generate_sequences(prompts)

    trainer = toy_trainer(off_policy(5), {**SEPARATE, Role.Rollout: Failing}, val_dataset=None)
    trainer.init_workers()
    with pytest.raises(WorkerError) as caught:
        trainer.fit()
    assert (caught.value.role, caught.value.rank, caught.value.coordinates) == ("rollout", 0, {})
    assert trainer.global_steps == 2  # the batch in flight fails in step 2, which ends; step 3 needs it


def test_a_batch_of_another_size_than_the_one_in_flight_is_rejected() -> None:
    trainer = toy_trainer(off_policy(5), SEPARATE)
    trainer.init_workers()
    trainer.train_step(trainer.draw())
    with pytest.raises(DataError) as caught:
        trainer.train_step(trainer.draw()[:47])
    assert (caught.value.rows, caught.value.expected) == (47, 48)


TOGETHER = {Role.ActorRollout: ToyActor, Role.RefPolicy: ToyActor, Role.Critic: ToyCritic}
NO_CRITIC = {role: cls for role, cls in SEPARATE.items() if role is not Role.Critic}


def with_gpus(roles: dict[Role, Any], **pools: str) -> ResourcePoolManager:
    mapping = {role: pools.get(role.name, "pool") for role in roles}
    return ResourcePoolManager({name: [1] for name in {*mapping.values()}}, mapping, use_gpu=True)


@pytest.mark.parametrize(
    ("config", "roles", "others", "key"),
    [
        (
            off_policy(1),
            TOGETHER,
            {},
            "trainer.max_staleness",
        ),
        (
            off_policy(1, AlgorithmConfig(adv_estimator="remax")),
            NO_CRITIC,
            {},
            "algorithm.adv_estimator",
        ),
        (
            off_policy(1),
            SEPARATE,
            {"rollout_fn": lambda *_: None},
            "trainer.max_staleness",
        ),
        (
            off_policy(1),
            SEPARATE,
            {"resource_pool_manager": with_gpus(SEPARATE, Critic="other")},
            "trainer.max_staleness",
        ),
        (off_policy(1, offload="always"), SEPARATE, {}, "trainer.max_staleness"),
    ],
    ids=["one-group", "remax", "rollout_fn", "one-pool-of-gpus", "offload"],
)
def test_what_cannot_be_generated_ahead_is_rejected_before_anything_starts(
    config: PPOConfig, roles: dict[Role, Any], others: dict[str, Any], key: str
) -> None:
    CALLS.clear()
    with pytest.raises(ConfigError) as caught:
        toy_trainer(config, roles, **others)
    assert caught.value.key == key
    assert CALLS == []
    allowed = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, max_staleness=0))
    toy_trainer(allowed, roles, **others)


@pytest.mark.parametrize("staleness", ["2", -1, True, 0.5])
def test_other_values_of_max_staleness_are_rejected(staleness: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(max_staleness=staleness)
    assert caught.value.key == "trainer.max_staleness"


def test_a_rollout_in_a_pool_of_its_own_may_have_gpus() -> None:
    pools = with_gpus(SEPARATE, Rollout="inference")
    assert toy_trainer(off_policy(1), SEPARATE, resource_pool_manager=pools).config.trainer.max_staleness == 1


def test_a_run_without_a_correction_for_the_older_policy_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        toy_trainer(off_policy(1), SEPARATE)
        toy_trainer(off_policy(1, AlgorithmConfig(old_log_probs="rollout")), SEPARATE)
        assert caplog.text == ""
        toy_trainer(off_policy(1, AlgorithmConfig()), SEPARATE)
    assert "trainer.max_staleness is 1, and nothing corrects for the older policy" in caplog.text


def test_a_worker_class_without_policy_versions_is_reported() -> None:
    class Unversioned(SeparateActor):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
        def generate_sequences(self, prompts: DataProto) -> DataProto:
            generated = super().generate_sequences(prompts)
            generated.pop(["policy_version"])
            return generated

    with pytest.raises(DataError) as caught:
        run(off_policy(1), {**SEPARATE, Role.Rollout: Unversioned})
    assert caught.value.columns == ["policy_version"]


def test_importance_weights_are_the_trained_policy_over_the_generating_one() -> None:
    class Weights(Callback):
        def batch_ready(self, trainer: Any, batch: DataProto) -> None:
            policy = ToyActor._log_probs(trainer.actor.workers[0].table, batch)
            ratio = torch.exp(policy - batch.batch["rollout_log_probs"]).clamp(max=2.0)
            actual.append((batch.batch["importance_weights"], ratio))

    actual: list[tuple[torch.Tensor, torch.Tensor]] = []
    run(off_policy(4), callbacks=[Weights()])
    for weights, expected in actual:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    assert bool((actual[0][0] == 1.0).all()) and all(bool((weights != 1.0).any()) for weights, _ in actual[1:])


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_before_the_workers_were_started_says_what_to_call(staleness: int) -> None:
    trainer = toy_trainer(off_policy(1, max_staleness=staleness), SEPARATE, val_dataset=None)
    with pytest.raises(ConfigError) as caught:
        trainer.train_step(trainer.draw())
    assert caught.value.key == "rollout"
