"""Every rank has a GPU of its own, or none has."""

from __future__ import annotations

import pytest
import torch

from mcontroller.devices import device_of_rank
from mcontroller.errors import ResourceError
from mcontroller.ray.host import _choose_device
from workers.config import ParallelConfig
from workers.megatron_worker import MegatronWorker


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """torch says that it sees two; the devices that were set."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    return chosen


def test_the_local_rank_is_the_index_of_the_gpu(two_gpus: list[torch.device]) -> None:
    assert [device_of_rank(rank, 2) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_ranks_are_on_the_cpu_where_torch_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of_rank(5, 8) == torch.device("cpu")


@pytest.mark.parametrize("local_rank", [0, 2])
def test_more_ranks_than_gpus_are_refused_on_every_rank(two_gpus: list[torch.device], local_rank: int) -> None:
    with pytest.raises(ResourceError) as caught:
        device_of_rank(local_rank, 3)
    assert "has 3 ranks on this node" in str(caught.value)
    assert f"local rank {local_rank} can see 2 (CUDA_VISIBLE_DEVICES is '4,5')" in str(caught.value)


def test_a_process_chooses_its_device_before_its_worker_is_made(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    _choose_device(None)
    _choose_device(1)
    assert two_gpus == [torch.device("cuda", 1)]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ResourceError, match="has 3 ranks on this node"):
        _choose_device(1)


def test_a_worker_does_not_share_a_gpu_with_another(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 2, "WORLD_SIZE": 3, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ResourceError, match="local rank 2 can see 2"):
        MegatronWorker(ParallelConfig(), timeout_s=5)
    assert two_gpus == []
