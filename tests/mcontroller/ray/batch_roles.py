"""Workers that take batches; starting one loads torch."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mcontroller.channel.worker import KeptResults
from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.ray import process
from mcontroller.worker import Worker


class Batches(Worker):
    """Counts the handles that its process fetches."""

    def __init__(self) -> None:
        self.fetched = 0
        fetch = process.fetch

        def counted(handles: Sequence[Any], timeout: float | None = None) -> list[Any]:
            self.fetched += len(handles)
            return fetch(handles, timeout)

        process.fetch = counted

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def same(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, blocking=False)
    def same_later(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def scribble(self, batch: DataProto) -> DataProto:
        batch.batch["ids"].fill_(self.rank)
        return batch

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def with_plain(self, batch: DataProto, plain: torch.Tensor) -> DataProto:
        plain += 1
        return DataProto.from_dict({"sum": plain.sum().expand(len(batch))})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def unshippable_unless_collected(self, batch: DataProto) -> Any:
        return batch if self.rank in (0, 2) else threading.Lock()

    def kept_results(self) -> int:
        """How many results of earlier calls the process keeps."""
        [kept] = (instance for instance in gc.get_objects() if isinstance(instance, KeptResults))
        return len(kept)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self, tensor: torch.Tensor) -> float:
        return tensor.sum().item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count_fetched(self) -> int:
        count, self.fetched = self.fetched, 0
        return count

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, blocking=False)
    def fail_later(self, batch: DataProto) -> DataProto:
        raise ValueError("no batch from here")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def meet(self, mine: str, other: str) -> bool:
        """Whether the other group's ranks come while this one is waiting for them."""
        Path(mine).touch()
        waited = threading.Event()
        return any(Path(other).exists() or waited.wait(0.01) for _ in range(6_000)) and Path(other).exists()


class Chained(Worker):
    """Takes and returns batches; reports no coordinates."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def made_but_on_rank_1(self, batch: DataProto, dies: bool) -> DataProto:
        if self.rank == 1 and dies:
            os._exit(3)
        if self.rank == 1:
            raise ValueError("no batch from here")
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def passed(self, batch: DataProto) -> DataProto:
        return batch
