"""The process groups of a layout on GPUs: their backends, and how many communicators have buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel_state import ParallelLayout
from parallel_state.megatron import MegatronContext
from tests.forking import run_ranks
from tests.workers.roles import actor, experience, own_shard
from workers.memory.nccl import nccl_bytes

pytestmark = pytest.mark.processes


def backends() -> set[str]:
    return {dist.get_backend(group) for group in MegatronContext(ParallelLayout(world_size=2, tp=2)).groups()}


def test_a_layout_on_gpus_has_no_gloo_group() -> None:
    assert run_ranks(backends, 2) == [{"nccl"}] * 2


def used_by_updates(parallel: dict[str, Any], distributed: bool) -> tuple[int, int]:
    """Return the bytes that the communicators of an update take, and the estimate."""
    before = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    worker = actor(parallel, "actor", ppo_epochs=1, optim={"lr": 1e-3, "distributed_optimizer": distributed})
    worker.update_actor(own_shard(experience(8), worker))
    held = before - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    return held, nccl_bytes(worker.context.layout, experts=False, sharded=distributed)


@pytest.mark.parametrize(
    ("ranks", "parallel", "distributed"),
    [(2, {"tp": 2}, False), (2, {"pp": 2}, False), (2, {}, True), (4, {"tp": 2, "pp": 2}, True)],
    ids=["tp2", "pp2", "dp2", "tp2-pp2"],
)
def test_the_estimate_counts_the_communicators_of_an_update(
    ranks: int, parallel: dict[str, Any], distributed: bool
) -> None:
    for held, estimated in run_ranks(used_by_updates, ranks, parallel, distributed):
        assert held == estimated > 0
