"""A rollout's group that failed is started again, and the run goes on with the weights of the actor."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError, GroupError
from tests.trainer.separate import SEPARATE, SeparateActor
from tests.trainer.toy import CALLS, toy_config, toy_trainer
from trainer import AlgorithmConfig, Callback, PPOConfig, Role, restart_rollout
from trainer.mismatch import ImportanceConfig


class FailingActor(SeparateActor):
    fails: ClassVar[bool] = False

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        if FailingActor.fails:
            raise RuntimeError("the engine has died")
        return super().generate_sequences(prompts)


class Versions(Callback):
    def __init__(self) -> None:
        self.of_batches: list[set[int]] = []

    def batch_ready(self, trainer: Any, batch: DataProto) -> None:
        self.of_batches.append(set(batch.batch["policy_version"].tolist()))


ROLES = {**SEPARATE, Role.Actor: FailingActor, Role.Rollout: FailingActor}


def config(staleness: int) -> PPOConfig:
    corrected = AlgorithmConfig(importance=ImportanceConfig(level="token"))
    return dataclasses.replace(toy_config(9, max_staleness=staleness), rollout=0.5, ref=0.5, algorithm=corrected)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_goes_on_with_a_new_group_and_generates_batches_in_flight_again(staleness: int) -> None:
    versions = Versions()
    with toy_trainer(config(staleness), ROLES, callbacks=[versions]) as trainer:
        trainer.init_workers()
        trainer.train_step(trainer.draw())
        FailingActor.fails = True
        try:
            with pytest.raises(GroupError) as caught:
                for _ in range(staleness + 1):
                    trainer.train_step(trainer.draw())
            assert (caught.value.role, caught.value.rank, caught.value.coordinates) == ("rollout", 0, {})
        finally:
            FailingActor.fails = False
        actor, rollout, before = trainer.actor, trainer.rollout, len(versions.of_batches)
        CALLS.clear()
        restart_rollout(trainer)
        assert trainer.rollout is trainer.groups["rollout"] is rollout and trainer.actor is actor
        assert CALLS.count("transfer") == CALLS.count("generate_sequences") == staleness
        metrics = trainer.train_step(trainer.draw())
        assert metrics["weights/seconds"] == 0.5
        trainer.train_step(trainer.draw())
        assert versions.of_batches[before:] == [{before}, {before + 1 - staleness}]


def test_one_group_for_actor_and_rollout_is_rejected() -> None:
    with toy_trainer(toy_config(1)) as trainer:
        trainer.init_workers()
        with pytest.raises(ConfigError) as caught:
            restart_rollout(trainer)
        assert caught.value.key == "role_worker_mapping"
