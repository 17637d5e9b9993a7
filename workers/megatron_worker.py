"""A worker whose methods run on one Megatron layout: torch.distributed, the groups, and where this rank stands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from mcontroller.decorator import register, registration_of
from mcontroller.devices import device_of_rank
from mcontroller.dispatch import Dispatch
from mcontroller.worker import Worker
from parallel_state import DistGlobalInfo, DistRankInfo
from parallel_state.megatron import MegatronContext, initialize_distributed
from workers.config import ParallelConfig

__all__ = ["MegatronWorker"]


class MegatronWorker(Worker):
    """The base of workers that compute with Megatron-Core.

    A registered method of a subclass runs with this worker's Megatron context active: inside it Megatron's globals
    are this worker's, also where several workers with several layouts share the process.

    Args:
        parallel: the sizes of the axes; checked against the world size before anything is joined.
        seed: of Megatron's random tracker.
        timeout_s: after so many seconds a rendezvous or a collective fails.

    Raises:
        LayoutError: the axes do not divide the world size; with the arithmetic.
        ResourceError: torch can use GPUs here, but sees fewer than the group has ranks on this node.
    """

    def __init__(self, parallel: ParallelConfig, *, seed: int = 1234, timeout_s: float = 600.0) -> None:
        super().__init__()
        self.parallel = parallel
        layout = parallel.layout(self.world_size)
        self.device = device_of_rank(self.local_rank, self._environment.local_world_size)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        address, port = self.get_master_addr_port()
        initialize_distributed(
            rank=self.rank, world_size=self.world_size, init_method=f"tcp://{address}:{port}", timeout_s=timeout_s
        )
        self.context = MegatronContext(layout, seed, timeout_s=timeout_s)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in list(vars(cls).items()):
            if inspect.isfunction(member) and registration_of(cls, name) and not inspect.iscoroutinefunction(member):
                setattr(cls, name, _within_context(member))

    def before_call(self, method: str) -> None:
        """What a subclass wants done before each of its registered methods; by default nothing."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_megatron_rank_info(self) -> DistRankInfo:
        """Where this rank stands on each axis, as Megatron says."""
        return self.context.rank_info()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_megatron_global_info(self) -> DistGlobalInfo:
        """The size of each axis, as Megatron says."""
        return self.context.global_info()


def _within_context(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def within_context(self: MegatronWorker, *args: Any, **kwargs: Any) -> Any:
        with self.context.activate():
            self.before_call(method.__name__)
            return method(self, *args, **kwargs)

    return within_context
