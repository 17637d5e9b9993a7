"""A worker of two tensor-parallel pairs, with collectives that one rank skips or never reaches."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.worker import Worker


class Pairs(Worker):
    def __init__(self) -> None:
        dist.init_process_group("gloo")
        groups = [dist.new_group(ranks, group_desc="TENSOR_MODEL_PARALLEL_GROUP") for ranks in ([0, 1], [2, 3])]
        self.pair = groups[dist.get_rank() // 2]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def skip_on(self, rank: int) -> None:
        if dist.get_rank() != rank:
            dist.all_reduce(torch.ones(3), group=self.pair)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def oversleep_on(self, rank: int) -> None:
        if dist.get_rank() == rank:
            self.oversleep()
        dist.all_reduce(torch.ones(3), group=self.pair)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def oversleep_alone_on(self, rank: int) -> None:
        if dist.get_rank() == rank:
            self.oversleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_on(self, rank: int) -> None:
        dist.all_reduce(torch.ones(3), group=self.pair)
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.broadcast(torch.ones(2, 2), dist.get_rank() // 2 * 2 + 1, group=self.pair)

    def oversleep(self) -> None:
        while True:
            time.sleep(0.05)
