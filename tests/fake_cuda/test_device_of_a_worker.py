"""The GPUs that the processes of a group see, with real Ray: code for one GPU runs on the GPU of its rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcontroller.ray.class_with_init import RayClassWithInitArgs
from mcontroller.ray.resource_pool import RayResourcePool
from mcontroller.ray.worker_group import RayWorkerGroup
from tests.fake_cuda.device_roles import UsesDevicesFirst
from workers.config import ParallelConfig

HERE = Path(__file__).parent
FAKE_CUDA = {"PYTHONPATH": f"{HERE / 'every_process'}{os.pathsep}{HERE.parents[1]}"}


@pytest.mark.parametrize(("isolated", "connections"), [(False, None), (True, "8")])
def test_the_gpu_of_a_rank_is_current_before_its_worker_is_constructed(
    ray_cluster: None, isolated: bool, connections: str | None
) -> None:
    """Connections are set before a process first uses CUDA; the environment's value stays."""
    variables = dict(FAKE_CUDA)
    if connections is not None:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    init = RayClassWithInitArgs(UsesDevicesFirst, ParallelConfig(tp=2))
    init.update_options({"runtime_env": {"env_vars": variables}})
    with RayResourcePool([2], isolate_gpus=isolated) as pool, RayWorkerGroup(pool, init) as group:
        devices = group.devices()
        assert group.total() == [1.0, 1.0]
        assert group.connections() == [connections or "1"] * 2
    for rank, (before, after, device) in enumerate(devices):
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
        assert device == f"cuda:{index}"
