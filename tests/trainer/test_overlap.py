"""Stages of a step overlap if their groups do not compete, with the results of the sequential order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import GroupError, WorkerError
from mcontroller.local import LocalCall, LocalExecutor, LocalWorkerGroup
from mcontroller.ray import ResourcePoolManager
from mcontroller.transport import Arguments
from tests.trainer.toy import CALLS, ToyActor, ToyCritic, toy_config, toy_trainer
from trainer import AlgorithmConfig, KLControlConfig, Role, weighted_sum
from trainer.stages import SharedDevices, Stages
from workers.role_worker import RoleWorker

SECONDS = {
    "generate_sequences": 5.0,
    "compute_log_prob": 2.0,
    "compute_ref_log_prob": 3.0,
    "compute_values": 4.0,
    "compute_rm_score": 1.0,
}
"""How long the calls take, by the clock of the test; others take no time."""


class Clock:
    """The time of a test, which passes only while the controller waits for calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: dict[str, tuple[float, float]] = {}

    def overlap(self, left: str, right: str) -> bool:
        return self.ran[left][0] < self.ran[right][1] and self.ran[right][0] < self.ran[left][1]


class TimedCall(LocalCall):
    def __init__(self, call: LocalCall, clock: Clock, ends: float) -> None:
        self.parts, self.outlines, self._error = call.parts, call.outlines, call._error
        self.number = call.number
        self.clock, self.ends, self.cancelled = clock, ends, False

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.now = (
            min(self.ends, self.clock.now + (timeout or 0.0)) if self.clock.now < self.ends else (self.clock.now)
        )
        return self.clock.now >= self.ends

    def check(self, timeout: float | None = None) -> None:
        self.clock.now = max(self.clock.now, self.ends)
        super().check()

    def cancel(self) -> None:
        self.cancelled = True


class TimedExecutor(LocalExecutor):
    """A LocalExecutor whose calls end later, by the clock, one after another."""

    def __init__(self, clock: Clock, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.clock, self.free, self.calls = clock, 0.0, list[TimedCall]()

    def submit(
        self, method: str, arguments: Mapping[int, Arguments], returning: Sequence[int], **options: Any
    ) -> TimedCall:
        started = max(self.clock.now, self.free)
        self.free = started + SECONDS.get(method, 0.0)
        self.clock.ran[method] = started, self.free
        options.pop("timeout", None)
        self.calls.append(TimedCall(super().submit(method, arguments, returning, **options), self.clock, self.free))
        return self.calls[-1]


class Reference(ToyActor):
    """The reference policy in a separate group."""

    kept = ()


class RewardModel(RoleWorker):
    def __init__(self, config: float) -> None:
        pass

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        CALLS.append("compute_rm_score")
        return DataProto.from_dict({"rm_scores": data.batch["responses"].float() / 10})


ROLES = {
    Role.ActorRollout: ToyActor,
    Role.RefPolicy: Reference,
    Role.Critic: ToyCritic,
    Role.RewardModel: RewardModel,
}


def timed_trainer(clock: Clock, roles: dict | None = None, pools: Mapping[Role, str] | None = None, **others: Any):
    """A trainer of toy roles, each in the pool of its name by default, whose calls take the seconds of the clock."""
    roles = ROLES if roles is None else roles
    names = {role: str(role) for role in roles} if pools is None else pools
    manager = ResourcePoolManager({name: [1] for name in names.values()}, names, others.pop("use_gpu", False))

    def start(pool: Any, init: Any, name_prefix: str) -> LocalWorkerGroup:
        group = LocalWorkerGroup(init, 1, name_prefix=name_prefix)
        group.executor = TimedExecutor(clock, init, 1, name_prefix)
        return group

    config = dataclasses.replace(
        toy_config(others.pop("steps", 1)),
        ref=0.0,
        reward_model=0.0,
        algorithm=AlgorithmConfig(kl_ctrl=KLControlConfig(kl_coef=0.1)),
    )
    trainer = toy_trainer(
        config,
        roles,
        resource_pool_manager=manager,
        ray_worker_group_cls=start,
        combine_rewards=weighted_sum(),
        val_dataset=None,
        **others,
    )
    trainer.init_workers()
    CALLS.clear()
    return trainer


SCORING = ("compute_log_prob", "compute_ref_log_prob", "compute_values", "compute_rm_score")


def test_the_scoring_stages_of_groups_on_different_pools_run_at_the_same_time():
    clock = Clock()
    with timed_trainer(clock) as trainer:
        trainer.fit()
    starts = {clock.ran[method][0] for method in SCORING}
    assert max(starts) - min(starts) < 0.1
    ends = max(clock.ran[method][1] for method in SCORING)
    longest = SECONDS["generate_sequences"] + SECONDS["compute_values"]
    assert longest <= ends < longest + 0.1


def test_groups_of_one_pool_overlap_on_cpus_and_not_on_shared_gpus():
    for use_gpu in (False, True):
        clock = Clock()
        pools = dict.fromkeys(ROLES, "pool") | {Role.RewardModel: "other"}
        with timed_trainer(clock, pools=pools, use_gpu=use_gpu) as trainer:
            trainer.fit()
        assert clock.overlap("compute_log_prob", "compute_values") is not use_gpu
        assert clock.overlap("compute_log_prob", "compute_ref_log_prob") is not use_gpu
        assert clock.overlap("compute_log_prob", "compute_rm_score")


def test_a_stage_that_waits_starts_while_the_trainer_waits_for_another_group():
    clock = Clock()
    pools = {Role.ActorRollout: "a", Role.RefPolicy: "a", Role.Critic: "b", Role.RewardModel: "b"}
    with timed_trainer(clock, pools=pools, use_gpu=True) as trainer:
        trainer.fit()
    assert clock.overlap("compute_ref_log_prob", "compute_values")
    assert clock.ran["compute_rm_score"][0] >= clock.ran["compute_values"][1]
    longest = SECONDS["generate_sequences"] + 5.0
    assert longest <= max(clock.ran[method][1] for method in SCORING) < longest + 0.2


class InOrder(SharedDevices):
    """Devices on which every group competes with every other: one stage runs after another."""

    def compete(self, left: Any, right: Any) -> bool:
        return True


def trained(sequential: bool) -> tuple[torch.Tensor, torch.Tensor, list[dict[str, float]]]:
    logged: list[dict[str, float]] = []

    class Logs:
        def log(self, metrics: Mapping[str, float], step: int, phase: str) -> None:
            logged.append({name: value for name, value in metrics.items() if not name.startswith(("timing", "perf"))})

        def close(self) -> None:
            pass

    clock = Clock()
    with timed_trainer(clock, steps=5, trackers=[Logs()]) as trainer:
        if sequential:
            trainer.stages.devices = InOrder("never")
        trainer.fit()
        tables = [trainer.groups[name].executor.workers[0].table for name in ("actor", "critic")]
    assert clock.overlap("compute_log_prob", "compute_values") is not sequential
    return tables[0], tables[1], logged


def test_a_run_with_overlapping_stages_equals_the_sequential_one_to_the_bit():
    overlapped, sequential = trained(False), trained(True)
    assert torch.equal(overlapped[0], sequential[0]) and torch.equal(overlapped[1], sequential[1])
    assert overlapped[2] == sequential[2] and len(overlapped[2]) == 6


class FailingModel(RewardModel):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        raise ValueError("no score")


class LaterFailingCritic(ToyCritic):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        raise ValueError("no value")


def test_the_first_failure_is_raised_and_all_other_stages_are_cancelled(caplog):
    clock = Clock()
    pools = dict.fromkeys(ROLES, "pool") | {Role.RewardModel: "other"}
    roles = {**ROLES, Role.RewardModel: FailingModel, Role.Critic: LaterFailingCritic}
    with timed_trainer(clock, roles, pools, use_gpu=True) as trainer:
        with pytest.raises(WorkerError) as caught:
            trainer.fit()
        assert (caught.value.role, caught.value.rank, caught.value.coordinates) == ("reward", 0, {})
        [call] = [call for call in trainer.actor.executor.calls if call.cancelled]
        assert call.ends == SECONDS["generate_sequences"] + SECONDS["compute_log_prob"]
    assert not {"compute_ref_log_prob", "compute_values", "update_actor"} & clock.ran.keys()
    assert "cancelled the stages old log-probs, reference, values" in caplog.text


def test_a_reward_function_that_raises_cancels_the_stages_that_run():
    def no_reward(batch: DataProto) -> None:
        raise ZeroDivisionError

    clock = Clock()
    with timed_trainer(clock, reward_fn=no_reward) as trainer:
        with pytest.raises(ZeroDivisionError):
            trainer.fit()
        cancelled = {
            name for name, group in trainer.groups.items() if any(call.cancelled for call in group.executor.calls)
        }
    assert cancelled == {"actor", "ref", "critic"}


def test_the_seconds_of_overlapping_stages_add_up_to_those_of_the_step():
    stages = Stages()
    stages.ran("reference", 1.0, 4.0)
    stages.ran("values", 2.0, 6.0)
    stages.ran("update", 7.0, 8.0)
    step = stages.take_step(8.5)
    assert step == {"reference": 3.0, "values": 4.0, "update": 1.0, "controller": 2.5, "overlapped": -2.0}
    assert stages.totals == step and stages.take_step(1.0) == {"controller": 1.0}


def test_a_result_is_read_in_any_order_and_after_the_block():
    clock = Clock()
    with timed_trainer(clock) as trainer:
        batch = trainer.step.generate(trainer.train_batches[0]).responses
        with trainer.stages.overlapping() as start:
            values = start("values", trainer.critic.compute_values, batch)
            scores = start("reward model", trainer.reward_model.compute_rm_score, batch)
            assert torch.equal(scores.get().batch["rm_scores"], batch.tensors()["responses"].float() / 10)
        assert values.get().batch["values"].shape == (48, 1)
        with pytest.raises(GroupError), trainer.stages.overlapping() as start:
            start("values", trainer.critic.compute_values, batch.select(["responses"]))
