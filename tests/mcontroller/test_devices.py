"""No two ranks share a GPU, or no rank has one."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller import devices
from mcontroller.devices import check_torch_without_gpu, compute_capability, device_of_rank
from mcontroller.errors import ResourceError
from mcontroller.ray.process import choose_device
from mcontroller.ray.reservation import by_name, gpus_of_bundles
from workers.config import ParallelConfig
from workers.megatron_worker import MegatronWorker


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Torch says that it sees two; the devices that were set."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    return chosen


def test_the_local_rank_is_the_index_of_the_gpu(two_gpus: list[torch.device]) -> None:
    assert [device_of_rank(rank, 2) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_ranks_are_on_the_cpu_if_torch_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of_rank(5, 8) == torch.device("cpu")


@pytest.mark.parametrize("local_rank", [0, 2])
def test_more_ranks_than_gpus_are_rejected_on_every_rank(two_gpus: list[torch.device], local_rank: int) -> None:
    with pytest.raises(ResourceError) as caught:
        device_of_rank(local_rank, 3)
    assert (caught.value.local_rank, caught.value.local_world_size, caught.value.visible) == (local_rank, 3, 2)


def test_a_process_chooses_its_device_before_its_worker_is_made(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    choose_device(None)
    choose_device(1)
    assert two_gpus == [torch.device("cuda", 1)]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ResourceError) as raised:
        choose_device(1)
    assert (raised.value.local_world_size, raised.value.visible) == (3, 2)


def test_a_worker_does_not_share_a_gpu_with_another(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 2, "WORLD_SIZE": 3, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ResourceError) as raised:
        MegatronWorker(ParallelConfig(), timeout_s=5)
    assert (raised.value.local_rank, raised.value.visible) == (2, 2)
    assert two_gpus == []


REASONS = {
    "Torch not compiled with CUDA enabled": AssertionError("Torch not compiled with CUDA enabled"),
    "The NVIDIA driver on your system is too old (found version 11040)": RuntimeError(
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
    ),
    "No CUDA GPUs are available": RuntimeError("No CUDA GPUs are available"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_rank_with_a_driver_and_no_gpu_for_torch_is_rejected_in_one_line(
    reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def init() -> None:
        raise REASONS[reason]

    (driver := tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\nGCC")
    monkeypatch.setattr(devices, "DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ResourceError) as caught:
        choose_device(0)
    assert (caught.value.torch, caught.value.visible) == (torch.__version__, "GPU-7")
    assert caught.value.driver.endswith("550.54.15") and reason in str(caught.value)
    assert "use_gpu=False" in str(caught.value)


def test_a_rank_without_a_driver_computes_on_the_cpu_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "none")
    check_torch_without_gpu()
    assert "computes on the CPU" in caplog.text


def test_gpus_are_ordered_by_index_and_uuids_by_name() -> None:
    assert sorted(["GPU-b", "10", "9", "GPU-a"], key=by_name) == ["9", "10", "GPU-a", "GPU-b"]


@pytest.mark.parametrize("assigned", [[["0"], ["0"]], [["0", "1"], ["1", "0"]], [[], ["1"]]])
def test_bundles_without_a_gpu_of_their_own_are_rejected(assigned: list[list[str]]) -> None:
    with pytest.raises(ResourceError) as raised:
        gpus_of_bundles(assigned)
    assert raised.value.gpus == assigned


def test_every_bundle_has_its_gpu() -> None:
    assert gpus_of_bundles([["GPU-b"], ["GPU-a"]]) == ["GPU-b", "GPU-a"]


class Nvml:
    """The driver's library on a machine whose GPUs have these compute capabilities."""

    def __init__(self, *capabilities: tuple[int, int]) -> None:
        self.capabilities = capabilities
        self.nvmlInit_v2 = self.nvmlShutdown = lambda: 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.capabilities)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        device._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.capabilities[device.value - 1]
        return 0


@pytest.mark.parametrize(("capabilities", "least"), [([], None), ([(10, 0)], (10, 0)), ([(9, 0), (8, 6)], (8, 6))])
def test_the_least_compute_capability_is_read_without_cuda(
    capabilities: list[tuple[int, int]], least: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml(*capabilities))
    assert compute_capability() == least
