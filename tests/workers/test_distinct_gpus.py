"""Two ranks of one group on one GPU are rejected before NCCL sees them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mcontroller.errors import ResourceError
from tests.forking import run_ranks
from tests.workers.roles import actor
from workers.gpu_ids import check_distinct

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, or a fake CUDA device")


def test_ranks_on_one_gpu_are_rejected_with_their_numbers() -> None:
    check_distinct(["node1 GPU-a", "node1 GPU-b", "node2 GPU-c"])
    with pytest.raises(ResourceError) as caught:
        check_distinct(["node1 GPU-a", "node1 GPU-b", "node1 GPU-a"])
    assert (caught.value.ranks, caught.value.node, caught.value.gpu) == ([0, 2], "node1", "GPU-a")
    assert caught.value.fields["ranks"] == [0, 2]


def started(same: bool) -> str:
    if same:
        torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(uuid="GPU-same", major=9, minor=0)
    try:
        actor({"tp": 2}, "actor")
    except ResourceError as error:
        return str(error)
    return "started"


@pytest.mark.processes
@NEEDS_GPU
def test_a_worker_checks_the_gpus_of_its_group() -> None:
    assert run_ranks(started, 2, False) == ["started"] * 2
    messages = run_ranks(started, 2, True)
    assert all("ranks 0, 1 of the group are on one GPU, GPU-same" in message for message in messages)
