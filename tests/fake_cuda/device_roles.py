"""A worker of a team that comes to a group with code for one GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from workers.config import ParallelConfig
from workers.megatron_worker import MegatronWorker


class Ported(MegatronWorker):
    """Notes the devices that its code would use before it calls ``super().__init__()``, and after."""

    def __init__(self) -> None:
        self.before = self._devices()
        super().__init__(ParallelConfig(), timeout_s=30)

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
