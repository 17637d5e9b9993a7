"""Base class of workers that compute with Megatron-Core: torch.distributed, the groups, this rank's coordinates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from mcontroller.devices import device_of_rank
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError
from mcontroller.worker import Worker
from parallel_state import DistGlobalInfo, DistRankInfo
from parallel_state.megatron import MegatronContext, initialize_distributed
from workers.config import ParallelConfig
from workers.gpu_ids import check_distinct_gpus
from workers.model.gpu_defaults import connection_variables, set_max_connections

_REPORTS = ("get_megatron_rank_info", "get_megatron_global_info")


class MegatronWorker(Worker):
    """Base class of workers that compute with Megatron-Core.

    Every call through a group runs inside ``call_context``, where Megatron's globals belong to this worker, even if
    several workers with different layouts share the process. So does the rest of a subclass's ``__init__`` after
    ``super().__init__(...)``. A subclass needs no code for that:

        class MyWorker(MegatronWorker):
            @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
            def compute(self, data): ...

    Outside a group, or in a call of another worker in the same process, enter the context yourself:

        with worker.call_context("compute"):
            worker.compute(data)

    A subclass that has its own groups needs no ``parallel``: it reports its layout by overriding
    ``get_megatron_rank_info`` and ``get_megatron_global_info``, and nothing is initialized for it. It has no
    ``context`` then.

    Args:
        parallel: the sizes of the axes; checked against the world size before the process joins the others. None only
            for a subclass that reports its layout itself.
        seed: of Megatron's random tracker.
        timeout_s: seconds after which the rendezvous or a collective fails.

    Attributes:
        parallel: the sizes of the axes.
        device: the device of this rank.
        context: the groups of the layout, and this rank's random state.

    Raises:
        ConfigError: ``parallel`` is None, and the subclass does not report its layout.
        LayoutError: the axes do not divide the world size; with the arithmetic.
        ResourceError: torch can use GPUs, but sees fewer than the group has ranks on this node; or two ranks are on one
            GPU.
    """

    _constructing: ExitStack | None = None
    """Exits the context when the outermost ``__init__`` returns; None outside of it."""

    def __init__(self, parallel: ParallelConfig | None = None, *, seed: int = 1234, timeout_s: float = 600.0) -> None:
        super().__init__()
        self.parallel = parallel
        self.device = device_of_rank(self.local_rank, self.local_world_size)
        if parallel is None:
            self._check_reports()
            return
        layout = parallel.layout(self.world_size)
        if self.device.type == "cuda":
            set_max_connections(parallel)  # before the device is used
            torch.cuda.set_device(self.device)
        address, port = self.get_master_addr_port()
        initialize_distributed(
            rank=self.rank, world_size=self.world_size, init_method=f"tcp://{address}:{port}", timeout_s=timeout_s
        )
        if self.device.type == "cuda":
            check_distinct_gpus(self.device)
        self.context = MegatronContext(layout, seed, timeout_s=timeout_s)
        if self._constructing is not None:
            self._constructing.enter_context(self.context.activate())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _leaving_context(cls.__init__)  # type: ignore[method-assign]

    @classmethod
    def cuda_variables(cls, capability: tuple[int, int] | None, *args: Any, **kwargs: Any) -> dict[str, str]:
        """Return CUDA_DEVICE_MAX_CONNECTIONS as the axes among the arguments need it; see ``max_connections``.

        A subclass that chooses its axes itself overrides this.
        """
        return connection_variables([*args, *kwargs.values()], capability)

    def call_context(self, method: str) -> AbstractContextManager[Any]:
        """Return the context of a call: this worker's Megatron context. To extend it, enter ``super()``'s in yours."""
        return nullcontext() if self.parallel is None else self.context.activate()

    @classmethod
    def _check_reports(cls) -> None:
        """Raise ConfigError unless the subclass reports its layout itself."""
        inherited = [name for name in _REPORTS if getattr(cls, name) is getattr(MegatronWorker, name)]
        if inherited:
            raise ConfigError(
                f"{cls.__name__} has no parallel, and does not override {' and '.join(inherited)}: call "
                "super().__init__(ParallelConfig(tp=..., pp=...)), or report the layout of groups that you build in "
                "both",
                key="parallel",
                value=None,
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_megatron_rank_info(self) -> DistRankInfo:
        """Return this rank's coordinates, as Megatron reports them."""
        return self.context.rank_info()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_megatron_global_info(self) -> DistGlobalInfo:
        """Return the size of each axis, as Megatron reports it."""
        return self.context.global_info()


def _leaving_context(init: Callable[..., None]) -> Callable[..., None]:
    """Return an ``__init__`` that, if it is outermost, exits the context that ``MegatronWorker.__init__`` enters."""

    @functools.wraps(init)
    def construct(self: MegatronWorker, *args: Any, **kwargs: Any) -> None:
        if self._constructing is not None:
            return init(self, *args, **kwargs)
        with ExitStack() as self._constructing:
            init(self, *args, **kwargs)
        del self._constructing
        if "parallel" not in vars(self):
            raise ConfigError(
                f"the __init__ of {type(self).__name__} does not call that of MegatronWorker: begin it with "
                "super().__init__(ParallelConfig(tp=..., pp=...))",
                key="parallel",
                value=None,
            )

    return construct
