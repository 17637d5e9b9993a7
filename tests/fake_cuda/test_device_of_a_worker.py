"""The GPUs that the processes of a group see, with real Ray: code for one GPU runs on the GPU of its rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mcontroller.ray.class_with_init import RayClassWithInitArgs
from mcontroller.ray.resource_pool import RayResourcePool
from mcontroller.ray.worker_group import RayWorkerGroup
from tests.fake_cuda.device_roles import Sharded, UsesDevicesFirst
from workers.config import ParallelConfig

HERE = Path(__file__).parent
FAKE_CUDA = {"runtime_env": {"env_vars": {"PYTHONPATH": f"{HERE / 'every_process'}{os.pathsep}{HERE.parents[1]}"}}}


def seen_by_two_ranks(isolated: bool) -> tuple[list[Any], list[float]]:
    init = RayClassWithInitArgs(UsesDevicesFirst).update_options(FAKE_CUDA)
    with RayResourcePool([2], isolate_gpus=isolated) as pool, RayWorkerGroup(pool, init) as group:
        return group.devices(), group.total()


@pytest.mark.parametrize("isolated", [False, True])
def test_the_gpu_of_a_rank_is_current_before_its_worker_is_constructed(ray_cluster: None, isolated: bool) -> None:
    devices, totals = seen_by_two_ranks(isolated)
    assert totals == [1.0, 1.0]
    for rank, (before, after, own) in enumerate(devices):
        index = 0 if isolated else rank
        assert (
            before
            == after
            == {
                "count": 1 if isolated else 2,
                "current": index,
                "cuda": f"cuda:{index}",
                "cuda()": f"cuda:{index}",
                "cuda:0": "cuda:0",  # the first of the node, unless it is the only one that the process sees
            }
        )
        assert own == f"cuda:{index}"


@pytest.mark.parametrize("own", [None, "8"])
def test_connections_are_set_before_a_process_first_uses_cuda(ray_cluster: None, own: str | None) -> None:
    """The environment's own value stays."""
    variables = FAKE_CUDA["runtime_env"]["env_vars"] | ({} if own is None else {"CUDA_DEVICE_MAX_CONNECTIONS": own})
    init = RayClassWithInitArgs(Sharded, ParallelConfig(tp=2))
    init.update_options({"runtime_env": {"env_vars": variables}})
    with RayResourcePool([2]) as pool, RayWorkerGroup(pool, init) as group:
        assert group.connections() == [own or "1"] * 2
