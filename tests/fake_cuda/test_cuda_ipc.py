"""Weights between groups that share GPUs: CUDA IPC with real Ray, and memory of fake CUDA devices."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import reductions

from mcontroller import RayResourcePool
from mcontroller.errors import ConfigError
from tests.fake_cuda.device_roles import OnGpu
from tests.workers.weights.transfer.between import check_death, check_hang, check_weights, policy
from workers.weights.transfer import weight_transfer
from workers.weights.transfer.weight_transfer import WeightTransfer

HERE = Path(__file__).parent
FAKE_CUDA = {"runtime_env": {"env_vars": {"PYTHONPATH": f"{HERE / 'every_process'}{os.pathsep}{HERE.parents[1]}"}}}


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    with RayResourcePool([2], name_prefix="ipc", max_colocate_count=2) as pool:
        yield pool


def test_weights_arrive_in_a_colocated_group_and_the_source_survives_it(
    pool: RayResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also, the buckets are freed whatever becomes of the processes that have mapped them."""
    monkeypatch.setattr(weight_transfer, "TARGET_GRACE", 0.5)
    with policy(pool, "actor", 1, {"tp": 2}, OnGpu, FAKE_CUDA) as actor:
        before = actor.gpu_memory()
        with policy(pool, "rollout", 2, {}, OnGpu, FAKE_CUDA) as rollout:
            held = [*actor.describe_weights(), *rollout.describe_weights()]
            assert len({rank.device for rank in held}) == 2 and len({rank.pid for rank in held}) == 4
            with WeightTransfer(actor, rollout) as transfer:
                assert transfer.transport == "cuda_ipc" and set(transfer.schedule.relays.values()) == {0, 1}
            with pytest.raises(ConfigError):
                WeightTransfer(actor, rollout, transport="process_group")
            check_weights(actor, rollout, "cuda_ipc")
            assert actor.gpu_memory() == before
            check_hang(actor, rollout, "cuda_ipc")
            assert actor.gpu_memory() == before
        with policy(pool, "rollout", 2, {}, OnGpu, FAKE_CUDA) as again:
            check_death(actor, again, "cuda_ipc")
        assert actor.gpu_memory() == before


def test_memory_of_another_gpu_or_process_is_not_mapped_as_this_one() -> None:
    memory = torch.zeros(8, dtype=torch.uint8, device="cuda:1")
    rebuild, arguments = reductions.reduce_tensor(memory)
    named = dict(inspect.signature(rebuild).bind(*arguments).arguments)
    with pytest.raises(RuntimeError):
        rebuild(**named | {"storage_device": 0})
    torch.UntypedStorage._release_ipc_counter(*arguments[-2:], device="cuda")
