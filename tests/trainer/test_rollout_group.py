"""Actor and rollout as separate groups: the rollout generates with the weights of the actor's last update."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mcontroller.errors import ConfigError
from tests.trainer.separate import SEPARATE, SeparateActor
from tests.trainer.toy import CALLS, ToyActor, ToyCritic, toy_config, toy_trainer
from trainer import PPOConfig, RayPPOTrainer, Role


def config(**trainer: Any) -> PPOConfig:
    return dataclasses.replace(toy_config(3, **trainer), rollout=0.5, ref=0.5)


def trained(trainer: RayPPOTrainer) -> np.ndarray:
    CALLS.clear()
    with trainer:
        trainer.init_workers()
        trainer.fit()
        (saved,) = trainer.actor.execute_all_sync("__getattribute__", "table")
    return saved.numpy()


def test_weights_are_sent_once_before_generation_and_after_every_update() -> None:
    trained(toy_trainer(config(test_freq=1, val_before_train=True), SEPARATE))
    kept = [call for call in CALLS if call in ("transfer", "generate_sequences", "update_actor")]
    update = ["update_actor", "transfer", "generate_sequences"]  # held-out problems, then the next step's
    assert kept == ["transfer", "generate_sequences", *["generate_sequences", *update] * 3]
    assert not SeparateActor.transfers[-1].is_open


@pytest.mark.parametrize(
    ("roles", "changes", "key"),
    [
        ({Role.Actor: SeparateActor}, {}, "role_worker_mapping"),
        ({Role.ActorRollout: ToyActor, Role.Rollout: ToyActor}, {}, "role_worker_mapping"),
        ({Role.Actor: ToyActor, Role.Rollout: ToyActor}, {}, "role_worker_mapping"),
        (SEPARATE, {"rollout": None}, "role_worker_mapping"),
        (SEPARATE, {"rollout": 0.25}, "rollout"),
    ],
    ids=["no-rollout", "two-rollouts", "no-transfer", "no-config", "another-model"],
)
def test_roles_that_do_not_fit_are_rejected_before_any_process_starts(
    roles: dict[Role, Any], changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        toy_trainer(dataclasses.replace(config(), **changes), {**roles, Role.Critic: ToyCritic})
    assert caught.value.key == key
