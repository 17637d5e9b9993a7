"""Workers on fake CUDA devices: one of a team that has code for one GPU, and a policy that reports its memory."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from tests.fake_cuda import ipc
from tests.fake_cuda.tags import initialization
from tests.workers.weights.transfer.roles import Policy
from workers.config import ParallelConfig
from workers.megatron_worker import MegatronWorker


class UsesDevicesFirst(MegatronWorker):
    """Notes the devices that its code would use before it calls ``super().__init__()``, and after."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self.before = self._devices()
        super().__init__(parallel, timeout_s=30)

    def _devices(self) -> dict[str, Any]:
        return {
            "count": torch.cuda.device_count(),
            "current": torch.cuda.current_device(),
            "cuda": str(torch.zeros(1, device="cuda").device),
            "cuda()": str(torch.zeros(1).cuda().device),
            "cuda:0": str(torch.zeros(1, device="cuda:0").device),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def devices(self) -> tuple[dict[str, Any], dict[str, Any], str]:
        """Return them, with the device of the worker."""
        return self.before, self._devices(), str(self.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self) -> float:
        """Return the sum of the ranks, over the group's NCCL."""
        assert dist.get_backend() == "nccl"
        rank = torch.tensor(float(self.rank), device=self.device)
        dist.all_reduce(rank)
        return rank.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connections(self) -> str | None:
        """Return CUDA_DEVICE_MAX_CONNECTIONS as it was when CUDA was first used."""
        return initialization.variables.get("CUDA_DEVICE_MAX_CONNECTIONS")


class OnGpu(Policy):
    """A policy that reports the memory of its GPU."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gpu_memory(self) -> tuple[int, int]:
        """Return the bytes that are allocated, and how many users have memory that this process exports."""
        gc.collect()  # what building the model has left in circles
        return torch.cuda.memory_allocated(), len(ipc.exported)
