"""Real roles with methods in which one rank leaves the others alone in a collective."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from workers import ActorRolloutRefWorker, CriticWorker


class Actor(ActorRolloutRefWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_until_killed(self, rank: int) -> None:
        for step in range(1_000_000):
            if self.rank == rank and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))


class Critic(CriticWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_without(self, rank: int) -> None:
        if self.rank == rank:
            oversleep()
        dist.all_reduce(torch.ones(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rendezvous(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "world_size": dist.get_world_size(), "rank": dist.get_rank()}


def oversleep() -> None:
    while True:
        time.sleep(0.1)
