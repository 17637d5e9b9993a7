"""A new worker that loads the state of its rank from memory goes on as the old one did, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.workers.roles import SAMPLED, actor, experience, largest_difference, own_shard, prompts, weights

ROWS = 16
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "transformer": {"moe_router_load_balancing_type": "none"},
}
pytestmark = pytest.mark.simulated


def go_on(worker: Any) -> dict[str, Any]:
    worker.update_actor(own_shard(experience(ROWS), worker))
    sampled = worker.generate_sequences(own_shard(prompts(ROWS, SAMPLED), worker))
    return {
        "weights": weights(worker),
        "tokens": None if sampled is None else sampled.batch["responses"].tolist(),
        "counters": dict(worker.state.counters),
        "lr": worker.state.optimizer.param_groups[0]["lr"],
    }


def save_and_go_on(parallel: dict[str, Any], path: str, changes: dict[str, Any], steps: int) -> dict[str, Any]:
    worker = actor(parallel, "actor_rollout_ref", ppo_epochs=1, **changes)
    worker.sync_reference()
    for _ in range(steps):
        worker.update_actor(own_shard(experience(ROWS), worker))
    worker.generate_sequences(own_shard(prompts(ROWS, SAMPLED), worker))
    file = f"{path}/{dist.get_rank()}"
    assert worker.save_to_memory(file) == Path(file).stat().st_size
    return go_on(worker)


def load_and_go_on(parallel: dict[str, Any], path: str, changes: dict[str, Any], _: int) -> dict[str, Any]:
    changes = changes | {"model": {"seed": 99} | changes.get("model", {})}
    worker = actor(parallel, "actor_rollout_ref", ppo_epochs=1, **changes)
    worker.load_from_memory(f"{path}/{dist.get_rank()}")
    return go_on(worker)


@pytest.mark.parametrize(
    ("world_size", "parallel", "changes", "steps"),
    [
        (4, {"pp": 2}, {"optim": {"distributed_optimizer": True}}, 1),
        (2, {"tp": 2}, {"optim": {"distributed_optimizer": False}}, 1),
        (2, {"ep": 2}, {"optim": {"distributed_optimizer": True}, "model": EXPERTS}, 1),
        (2, {}, {"optim": {"distributed_optimizer": True}}, 0),
        (1, {}, {"optim": {"distributed_optimizer": True}, "model": {"dtype": "bfloat16"}}, 1),
    ],
    ids=["distributed-optimizer", "optimizer", "experts", "before-the-first-step", "bfloat16"],
)
def test_training_goes_on_from_memory(
    world_size: int, parallel: dict[str, Any], changes: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    arguments = (parallel, str(tmp_path), changes, steps)
    expected = run_ranks(save_and_go_on, world_size, *arguments)
    actual = run_ranks(load_and_go_on, world_size, *arguments)
    for before, after in zip(expected, actual, strict=True):
        assert largest_difference(before.pop("weights"), after.pop("weights")) == 0
        assert before == after
