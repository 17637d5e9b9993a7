"""Optimizers, their settings and settings of single parameters: steps equal torch's own on the same gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.workers.roles import actor, experience, largest_difference, own_shard, weights
from workers.actor import ActorRolloutRefWorker
from workers.config import OptimConfig

pytestmark = pytest.mark.simulated

LR, DECAY, SLOW = 1e-2, 0.1, 1e-3
OPTIM: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "eps": 1e-4, "clip_grad": 0.0, "warmup_steps": 0}

Optimizers = dict[str, tuple[dict[str, Any], Callable[[list[dict[str, Any]]], torch.optim.Optimizer]]]
OPTIMIZERS: Optimizers = {
    "sgd": (
        {"optimizer": "sgd", "eps": 1e-8, "megatron": {"sgd_momentum": 0.5}},
        lambda groups: torch.optim.SGD(groups, momentum=0.5),
    ),
    "adamw": ({"eps": 1e-3}, lambda groups: torch.optim.AdamW(groups, eps=1e-3)),
    "adam with coupled decay": (
        {"betas": (0.8, 0.9), "megatron": {"decoupled_weight_decay": False}},
        lambda groups: torch.optim.Adam(groups, betas=(0.8, 0.9), eps=1e-4),
    ),
}


class WithSlowNorms(ActorRolloutRefWorker):
    """An actor whose output layer learns slowly and whose norms decay."""

    def parameter_groups(self, model: Any, config: OptimConfig) -> Any:
        slow = ParamGroupOverride(max_lr=SLOW, min_lr=0.0)  # type: ignore[typeddict-item]  # all keys until 0.19
        return {
            ParamKey(name="*output_layer.weight"): slow,
            ParamKey(name="*layernorm*"): ParamGroupOverride(wd_mult=2.0),
        }  # type: ignore[typeddict-item]


def settings_of(name: str, parameter: torch.Tensor, with_groups: bool) -> dict[str, float]:
    """Return learning rate and weight decay that a parameter should have."""
    if not with_groups:
        return {"lr": LR, "weight_decay": DECAY if parameter.ndim > 1 else 0.0}
    lr = SLOW if name.endswith("output_layer.weight") else LR
    return {"lr": lr, "weight_decay": 2 * DECAY if "layernorm" in name else DECAY}


def difference_from_torch(case: str, worker_class: type[ActorRolloutRefWorker]) -> float:
    """Return the largest difference of a weight after an update from torch's optimizer on the same gradients."""
    optim, make = OPTIMIZERS[case]
    worker = actor({}, "actor", worker_class, optim=OPTIM | optim)
    named = dict(worker.model[0].named_parameters())
    copies = {name: parameter.detach().clone() for name, parameter in named.items()}
    groups = worker_class is WithSlowNorms
    torch_optimizer = make([{"params": [copy], **settings_of(name, copy, groups)} for name, copy in copies.items()])
    step = worker.state.optimizer.step

    def both() -> Any:
        for name, copy in copies.items():
            copy.grad = named[name].main_grad.clone()
        torch_optimizer.step()
        return step()

    worker.state.optimizer.step = both
    before = {name: copy.clone() for name, copy in copies.items()}
    worker.update_actor(own_shard(experience(8), worker))
    assert worker.state.counters["optimizer_steps"] == 2
    assert all(not torch.equal(before[name], copy) for name, copy in copies.items())
    return largest_difference(dict(named), copies)


@pytest.mark.parametrize("worker_class", [ActorRolloutRefWorker, WithSlowNorms], ids=["", "parameter groups"])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_steps_equal_those_of_torch_on_the_same_gradients(case: str, worker_class: type[ActorRolloutRefWorker]) -> None:
    assert run_ranks(difference_from_torch, 1, case, worker_class)[0] < 1e-6


def trained(
    parallel: dict[str, Any], optim: dict[str, Any], ddp: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the weights after two steps, and the number of buckets of this rank's gradients."""
    worker = actor(parallel, "actor", WithSlowNorms, optim=OPTIM | optim, ddp=ddp)
    worker.update_actor(own_shard(experience(8), worker))
    return weights(worker), sum(len(buffer.buckets) for chunk in worker.model for buffer in chunk.buffers)


OVERLAP = {"overlap_grad_reduce": True}
DISTRIBUTED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("parallel", "optim", "ddp"),
    [
        ({}, OVERLAP, {"bucket_size": 5000}),
        ({}, DISTRIBUTED, {"bucket_size": 5000, "pad_buckets_for_high_nccl_busbw": True}),
        ({"tp": 2}, {}, {}),
    ],
    ids=["dp2", "dp2-distributed", "tp2"],
)
def test_parameter_groups_and_buckets_train_the_weights_of_one_process(
    parallel: dict[str, Any], optim: dict[str, Any], ddp: dict[str, Any]
) -> None:
    expected, one_bucket = run_ranks(trained, 1, {}, {}, {})[0]
    actual, buckets = run_ranks(trained, 2, parallel, optim, ddp)[0]
    assert largest_difference(actual, expected) < 1e-5
    assert one_bucket == 1 and buckets > 3 if ddp else buckets == 1


def continued(optim: dict[str, Any], directory: str) -> tuple[float, set[float]]:
    """Return the difference of a run that is continued from a checkpoint, and the learning rates of its groups."""
    worker, other = (actor({}, "actor", WithSlowNorms, optim=OPTIM | optim) for _ in range(2))
    for role in (worker, other):
        role.update_actor(own_shard(experience(8), role))
    worker.save_checkpoint(directory, 1)
    other.update_actor(own_shard(experience(16), other))
    other.load_checkpoint(directory)
    for role in (worker, other):
        role.update_actor(own_shard(experience(8), role))
    rates = {group["lr"] for group in other.state.optimizer.param_groups if group["params"]}
    return largest_difference(weights(worker), weights(other)), rates


@pytest.mark.parametrize(
    "optim",
    [{}, {"distributed_optimizer": True}, {"optimizer": "sgd", "eps": 1e-8}],
    ids=["adam", "adam-distributed", "sgd"],
)
def test_a_checkpoint_keeps_the_settings_of_single_parameters(optim: dict[str, Any], tmp_path: Path) -> None:
    ranks = run_ranks(continued, 2, optim, str(tmp_path))
    assert [difference for difference, _ in ranks] == [0.0, 0.0]
    assert set().union(*(rates for _, rates in ranks)) == {LR, SLOW}


MUON = importlib.util.find_spec("emerging_optimizers") is not None


@pytest.mark.skipif(not MUON, reason="emerging-optimizers is not installed; make test-newest installs it")
def test_muon_trains_the_weights_of_one_process(tmp_path: Path) -> None:
    optim = {"optimizer": "muon", "megatron": {"muon_momentum": 0.9, "muon_fp32_matmul_prec": "highest"}}
    expected, actual = (run_ranks(trained, ranks, {}, optim, {})[0][0] for ranks in (1, 2))
    assert largest_difference(actual, expected) < 1e-4
    assert [difference for difference, _ in run_ranks(continued, 2, optim, str(tmp_path))] == [0.0, 0.0]


REJECTED = ["adagrad", *([] if MUON else ["muon"])]


def rejections() -> list[tuple[str, str]]:
    """Return key and value of the errors about optimizers that are not installed, and about a contradiction."""

    class Contradicting(ActorRolloutRefWorker):
        def parameter_groups(self, model: Any, config: OptimConfig) -> Any:
            decaying = ParamGroupOverride(wd_mult=1.0)  # type: ignore[typeddict-item]
            return {**super().parameter_groups(model, config), ParamKey(name="*layernorm*"): decaying}

    cases = [*(({"optimizer": name}, ActorRolloutRefWorker) for name in REJECTED), ({}, Contradicting)]
    errors = []
    for optim, worker_class in cases:
        with pytest.raises(ConfigError) as caught:
            actor({}, "actor", worker_class, optim=optim)
        errors.append((caught.value.key, caught.value.value))
    return errors


def test_optimizers_that_cannot_be_built_are_rejected() -> None:
    assert run_ranks(rejections, 1) == [[("optim.optimizer", name) for name in (*REJECTED, "adam")]]


class ScheduleOfSamples(ActorRolloutRefWorker):
    """Its schedule decays over 64 samples, as in a training loop in Megatron-LM's style."""

    schedule_unit = "samples"

    def build_optimizer(self, model: Any, config: OptimConfig) -> Any:
        optimizer, scheduler = super().build_optimizer(model, config)
        scheduler.lr_decay_steps, scheduler.lr_decay_style = 64, "linear"
        return optimizer, scheduler


class Undeclared(ScheduleOfSamples):
    def build_optimizer(self, model: Any, config: OptimConfig) -> Any:
        return super().build_optimizer(model, config)


def rates_of_samples() -> tuple[int, float, str]:
    worker = actor({}, "actor", ScheduleOfSamples, optim={"lr": 1e-3, "min_lr": 0.0, "warmup_steps": 0})
    worker.update_actor(own_shard(experience(20), worker))
    with pytest.raises(ConfigError) as caught:
        actor({}, "actor", Undeclared)
    return worker.state.scheduler.num_steps, worker.state.scheduler.get_lr({}), caught.value.key


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_schedule_is_stepped_in_the_unit_that_it_declares(world_size: int) -> None:
    for steps, rate, key in run_ranks(rates_of_samples, world_size):
        assert steps == 40  # 2 epochs of 20 samples
        assert rate == pytest.approx(1e-3 * (64 - 40) / 64)
        assert key == "schedule_unit"
