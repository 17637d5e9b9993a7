"""Groups that share GPUs free their memory for each other, before the calls that need it."""

from __future__ import annotations

import pytest

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError
from mcontroller.ray import RayResourcePool, ResourcePoolManager
from tests.trainer.toy import CALLS, ToyActor, ToyCritic, toy_config, toy_trainer
from trainer import Role, TrainerConfig


class MovingActor(ToyActor):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self, parts=None, keep_for=None, communicators=False):
        CALLS.append(f"actor offloads{' with communicators' * communicators}, keeps for {keep_for}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_memory_use(self):
        return {"generate_sequences": {"allocated_gb": 2.0}, "update_actor": {"allocated_gb": 7.0}}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        CALLS.append("actor is built")
        super().init_model()


class MovingCritic(ToyCritic):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        CALLS.append("critic is built")
        super().init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self, parts=None, keep_for=None, communicators=False):
        CALLS.append(f"critic offloads{' with communicators' * communicators}, keeps for {keep_for}")


ROLES = {Role.ActorRolloutRef: MovingActor, Role.Critic: MovingCritic}


def calls_of_a_step(offload, *, use_gpu=True, pools=("pool", "pool"), communicators=False):
    manager = ResourcePoolManager({name: [1] for name in pools}, dict(zip(ROLES, pools, strict=True)), use_gpu)
    config = toy_config(1, offload=offload, offload_communicators=communicators)
    with toy_trainer(config, ROLES, resource_pool_manager=manager, val_dataset=None) as trainer:
        trainer.init_workers()
        CALLS.clear()
        metrics = trainer.train_step(trainer.train_batches[0])
    return [call for call in CALLS if "offloads" in call], list(CALLS), metrics


def test_every_stage_frees_the_memory_that_its_call_does_not_need():
    moves, calls, metrics = calls_of_a_step("auto")
    assert calls[:6] == [
        "critic offloads, keeps for None",
        "actor offloads, keeps for generate_sequences",
        "generate_sequences",
        "critic offloads, keeps for None",
        "actor offloads, keeps for compute_log_prob",
        "compute_log_prob",
    ]
    assert calls[-3:] == [
        "critic offloads, keeps for None",
        "actor offloads, keeps for update_actor",
        "update_actor",
    ]
    assert len(moves) == 12 and metrics["timing_s/offload"] > 0
    assert metrics["memory/actor/generate/allocated_gb"] == 2.0
    assert metrics["memory/actor/update_actor/allocated_gb"] == 7.0


def test_the_group_that_generates_is_built_last_when_the_others_have_left():
    CALLS.clear()
    manager = ResourcePoolManager({"pool": [1]}, dict.fromkeys(ROLES, "pool"), True)
    with toy_trainer(toy_config(1, offload="auto"), ROLES, resource_pool_manager=manager) as trainer:
        trainer.init_workers()
    assert CALLS[2:6] == [
        "critic is built",
        "critic offloads, keeps for None",
        "actor offloads, keeps for init_model",
        "actor is built",
    ]


@pytest.mark.parametrize(
    ("offload", "arguments"),
    [("never", {}), ("auto", {"use_gpu": False}), ("auto", {"pools": ("one", "other")})],
    ids=["never", "on CPUs", "on other GPUs"],
)
def test_nothing_moves_if_no_gpu_is_shared(offload, arguments):
    moves, _, metrics = calls_of_a_step(offload, **arguments)
    assert moves == [] and "timing_s/offload" not in metrics


def test_groups_that_leave_free_communicators_and_the_called_group_keeps_its():
    moves, _, _ = calls_of_a_step("auto", communicators=True)
    assert moves[:2] == [
        "critic offloads with communicators, keeps for None",
        "actor offloads, keeps for generate_sequences",
    ]


def test_always_moves_the_parts_of_a_group_that_is_alone_too():
    moves, _, _ = calls_of_a_step("always", use_gpu=False, pools=("one", "other"))
    assert moves[0] == "actor offloads, keeps for generate_sequences" and len(moves) == 6


def test_another_value_of_offload_is_rejected():
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(offload="sometimes")
    assert caught.value.key == "trainer.offload"


def test_pools_share_bundles_if_they_are_parts_of_one_pool():
    pool, other = RayResourcePool([2], use_gpu=False), RayResourcePool([2], use_gpu=False)
    assert pool.shares_bundles(pool) and not pool.shares_bundles(other)
