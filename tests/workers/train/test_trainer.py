"""``forward_backward`` and ``optim_step``, one after the other, equal one update to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcontroller.errors import ConfigError, DataError
from tests.ranks import run_ranks
from tests.workers.roles import MODEL, actor, critic, experience, own_shard, weights
from trainer import supervised_rows
from trainer.columns import STAGE_COLUMNS
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, CriticConfig, load_config
from workers.critic import CriticWorker

pytestmark = pytest.mark.simulated

ROWS = 8
LAYOUTS = {"one process": (1, {}), "tp2-dp2": (4, {"tp": 2}), "pp2-dp2": (4, {"pp": 2})}


def trained(role: str, parallel: dict[str, Any], separate: bool) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Make two steps; return the weights and the metrics of the second."""
    settings: dict[str, Any] = {"ppo_epochs": 1, "ppo_mini_batch_size": ROWS}
    worker: Any = actor(parallel, "actor", **settings) if role == "actor" else critic(parallel, **settings)
    mine = own_shard(experience(ROWS), worker)
    metrics: dict[str, float] = {}
    for _ in range(2):
        if separate:
            metrics = dict(worker.forward_backward(mine).meta_info["metrics"])
            metrics |= {f"{role}/{name}": value for name, value in worker.optim_step().items()}
        else:
            metrics = getattr(worker, f"update_{role}")(mine).meta_info["metrics"]
    return weights(worker), metrics


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_backward_and_optim_step_equal_one_update(role: str, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    updated = run_ranks(trained, world_size, role, parallel, False)
    separate = run_ranks(trained, world_size, role, parallel, True)
    for (expected, metrics), (actual, its_metrics) in zip(updated, separate, strict=True):
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
        assert its_metrics
        assert {name: metrics[name] for name in its_metrics} == its_metrics
        assert metrics.keys() - its_metrics.keys() <= {f"{role}/mfu"}  # on a GPU, from the time of the update


def steps_without_gradients() -> list[str]:
    worker = actor({}, "actor", ppo_epochs=1, ppo_mini_batch_size=ROWS)
    data, keys = experience(ROWS), []

    def rejected() -> None:
        with pytest.raises(ConfigError) as caught:
            worker.optim_step()
        keys.append(caught.value.key)

    rejected()
    worker.forward_backward(data)
    worker.optim_step()
    rejected()
    worker.forward_backward(data)
    worker.offload(["grads"])
    rejected()
    worker.forward_backward(data)
    worker.update_actor(data)
    rejected()
    return keys


def test_optim_step_is_rejected_without_gradients_to_apply() -> None:
    assert run_ranks(steps_without_gradients, 1) == [["optim_step"] * 4]


def rejected_between_two_calls() -> tuple[float, str]:
    """Add gradients of a batch without tokens, which is rejected, make the step, and go on in the same phase."""
    worker = actor({}, "actor", sft_optim={"lr": 5e-3})
    data = experience(ROWS)
    worker.forward_backward(data)
    nothing = experience(ROWS)
    nothing.batch["response_mask"][:] = 0
    for call in (lambda: worker.forward_backward(nothing, accumulate=True), lambda: worker.update_actor(nothing)):
        with pytest.raises(DataError):
            call()
    steps = worker.optim_step()["optimizer_steps"]
    worker = actor({}, "actor", sft_optim={"lr": 5e-3})
    worker.update_sft(supervised_rows(data))
    with pytest.raises(DataError):
        worker.update_actor(nothing)
    return steps, worker.state.counters["phase"]


def test_a_rejected_batch_leaves_earlier_gradients_and_the_phase() -> None:
    assert run_ranks(rejected_between_two_calls, 1) == [(1.0, "sft")]


def trained_on(role: str, only_read: bool) -> dict[str, torch.Tensor]:
    """Make one update with all columns of a batch, or without the columns of stages that the update does not read."""
    worker: Any = actor({}, "actor", use_kl_loss=True) if role == "actor" else critic({})
    data = experience(ROWS)
    if only_read:
        read = worker.columns_read(worker.config)
        data = data.select([name for name in data.tensors() if name not in STAGE_COLUMNS or name in read])
    getattr(worker, f"update_{role}")(data)
    return weights(worker)


@pytest.mark.parametrize(("role", "not_read"), [("actor", {"values", "returns"}), ("critic", {"advantages"})])
def test_an_update_needs_no_other_columns_of_the_stages_than_its_class_lists(role: str, not_read: set[str]) -> None:
    (expected,) = run_ranks(trained_on, 1, role, False)
    (actual,) = run_ranks(trained_on, 1, role, True)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    sizes = {"model": MODEL, "ppo_mini_batch_size": ROWS, "ppo_micro_batch_size": 2}
    config = load_config(ActorConfig if role == "actor" else CriticConfig, sizes)
    cls: Any = ActorRolloutRefWorker if role == "actor" else CriticWorker
    assert not not_read & set(cls.columns_read(config))
    own_update = type("OwnUpdate", (cls,), {f"update_{role}": lambda self, data: data})
    assert own_update.columns_read(config) is None


def updated_with_rows(role: str, order: list[int] | None) -> dict[str, torch.Tensor]:
    """Make an update of two mini-batches and two epochs with the rows in another order, and return the weights."""
    settings: dict[str, Any] = {"ppo_epochs": 2, "ppo_mini_batch_size": ROWS // 2}
    worker: Any = actor({}, "actor", **settings) if role == "actor" else critic({}, **settings)
    data = experience(ROWS)
    if order is not None:
        mini_batches = worker.mini_batches(worker.config, ROWS, 1, 0)
        data = data.with_tensors({"mini_batches": mini_batches}).select_idxs(torch.tensor(order))
    getattr(worker, f"update_{role}")(own_shard(data, worker))
    return weights(worker)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_given_mini_batches_make_the_update_independent_of_row_order(role: str) -> None:
    (expected,) = run_ranks(updated_with_rows, 1, role, None)
    for actual in run_ranks(updated_with_rows, 2, role, [5, 0, 7, 2, 1, 6, 3, 4]):
        for name, weight in expected.items():
            torch.testing.assert_close(actual[name], weight, rtol=0, atol=1e-6)
