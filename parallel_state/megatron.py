"""torch.distributed and Megatron's groups for a layout, and this rank's place in it, read back from Megatron.

Megatron keeps its groups, its random-number tracker and a few caches in module globals: one layout per process. A
``MegatronContext`` is one layout's set of these. Any number of contexts live side by side in a process; inside
``with context.activate():`` Megatron sees that context's set and no other. This is the only file that touches
Megatron's global state.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import re
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from parallel_state import cpu
from parallel_state.errors import LayoutError, ParallelStateError
from parallel_state.layout import ParallelLayout
from parallel_state.topology import DistGlobalInfo, DistRankInfo

cpu.install()

from megatron.core import parallel_state as mpu  # noqa: E402  # install() comes first
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel import random as megatron_random  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

__all__ = ["MegatronContext", "initialize_distributed"]


def initialize_distributed(
    backend: str | None = None,
    timeout_s: float = 600,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
) -> None:
    """Join this process to torch.distributed; nothing to do if it has joined with the same rank and world size.

    Args:
        backend: ``"nccl"`` where CUDA is available and ``"gloo"`` elsewhere, unless given.
        timeout_s: seconds after which the rendezvous, or a collective on the default group, fails.
        rank, world_size, init_method: from RANK, WORLD_SIZE and MASTER_ADDR:MASTER_PORT unless given. With NCCL
            the process's current CUDA device is the one it uses: set it before.

    Raises:
        ParallelStateError: the process has already joined with another rank or world size.
    """
    if dist.is_initialized():
        joined = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        asked = {"rank": rank, "world_size": world_size}
        if any(asked[name] not in (None, joined[name]) for name in asked):
            raise ParallelStateError(
                f"torch.distributed runs in this process as rank {joined['rank']} of {joined['world_size']}; it cannot "
                f"also be rank {rank} of {world_size}: one process is one rank",
                **joined,
            )
        return
    dist.init_process_group(
        backend or ("nccl" if torch.cuda.is_available() else "gloo"),
        init_method=init_method,
        rank=-1 if rank is None else rank,
        world_size=-1 if world_size is None else world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


class MegatronContext:
    """One layout's Megatron groups and random state in this process.

    Building one is collective: every rank of torch.distributed builds the same contexts in the same order.

    Args:
        layout: the sizes and order of the axes; its world size is torch.distributed's.
        seed: of Megatron's random tracker and of the device's generator, which is also this context's own, so that
            the random numbers of one role do not depend on what other roles in the process do.
        timeout_s: seconds after which a collective on one of the groups fails.

    Raises:
        LayoutError: the layout's world size is not torch.distributed's, or it has axes that Megatron does not know.
    """

    def __init__(self, layout: ParallelLayout, seed: int = 1234, *, timeout_s: float = 600) -> None:
        _check(layout)
        self.layout = layout
        self._globals = _Globals()
        with self.activate():
            mpu.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                order=layout.order,
                distributed_timeout_minutes=timeout_s / 60,  # ends in a timedelta, which takes fractions
                create_gloo_process_groups=dist.get_backend() != "gloo",
            )
            _share_gloo_groups()
            megatron_random.model_parallel_cuda_manual_seed(seed)
            self.pg = ProcessGroupCollection.use_mpu_process_groups()

    @contextlib.contextmanager
    def activate(self) -> Iterator[MegatronContext]:
        """While the block runs, Megatron's globals are this context's; what was there before returns after it.

        Blocks nest, of the same context and of others. One lock of the process is held for the block: a second
        thread that activates any context waits.
        """
        global _active
        with _lock:
            outer = _active
            outer.save()
            self._globals.load()
            _active = self._globals
            try:
                yield self
            finally:
                self._globals.save()
                outer.load()
                _active = outer

    @property
    def is_active(self) -> bool:
        """Whether Megatron's globals are this context's now."""
        return _active is self._globals

    def rank_info(self) -> DistRankInfo:
        """Where this rank stands on each axis, as Megatron says."""
        with self.activate():
            return DistRankInfo(
                tp_rank=mpu.get_tensor_model_parallel_rank(),
                pp_rank=mpu.get_pipeline_model_parallel_rank(),
                cp_rank=mpu.get_context_parallel_rank(),
                dp_rank=mpu.get_data_parallel_rank(),
                ep_rank=mpu.get_expert_model_parallel_rank(),
                etp_rank=mpu.get_expert_tensor_parallel_rank(),
                edp_rank=mpu.get_expert_data_parallel_rank(),
                vpp_rank=mpu.get_virtual_pipeline_model_parallel_rank(),
            )

    def global_info(self) -> DistGlobalInfo:
        """The size of each axis, as Megatron says."""
        with self.activate():
            return DistGlobalInfo(
                tp_size=mpu.get_tensor_model_parallel_world_size(),
                pp_size=mpu.get_pipeline_model_parallel_world_size(),
                cp_size=mpu.get_context_parallel_world_size(),
                dp_size=mpu.get_data_parallel_world_size(),
                ep_size=mpu.get_expert_model_parallel_world_size(),
                etp_size=mpu.get_expert_tensor_parallel_world_size(),
                edp_size=mpu.get_expert_data_parallel_world_size(),
                vpp_size=mpu.get_virtual_pipeline_model_parallel_world_size(),
            )


def _check(layout: ParallelLayout) -> None:
    if not dist.is_initialized():
        raise ParallelStateError("torch.distributed is not initialised: call initialize_distributed() first")
    if layout.world_size != dist.get_world_size():
        raise LayoutError(
            f"the layout is for {layout.world_size} ranks, torch.distributed runs {dist.get_world_size()}: "
            "a context covers all of them",
            layout_world_size=layout.world_size,
            world_size=dist.get_world_size(),
        )
    if layout.extra:
        raise LayoutError(
            f"Megatron has no axis {', '.join(map(repr, layout.extra))}: it knows tp, pp, cp, dp, ep, etp and vpp",
            axes=tuple(layout.extra),
        )


def _share_gloo_groups() -> None:
    """Where every group is gloo's already, Megatron's second set of gloo groups is the first."""
    for name, group in vars(mpu).items():
        if name.endswith("_GLOO") and group is None:
            setattr(mpu, name, getattr(mpu, name.removesuffix("_GLOO")))


def _parallel_state_names() -> list[str]:
    return [name for name in vars(mpu) if re.fullmatch(r"_[A-Z][A-Z_]*|_global_process_group_list", name)]


def _moe_metrics() -> tuple[ModuleType, tuple[str, ...]]:
    """Where the router's losses are collected, layer by layer, until they are logged."""
    if hasattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER"):  # megatron-core 0.16
        return moe_utils, ("_MOE_LAYER_WISE_LOGGING_TRACKER",)
    return importlib.import_module("megatron.core.transformer.moe.moe_logging"), ("_MOE_METRICS_TRACKER",)


# Everything in Megatron that belongs to one layout.
_HELD: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (mpu, tuple(_parallel_state_names())),
    (megatron_random, ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED")),
    _moe_metrics(),
)


class _Globals:
    """The values of what ``_HELD`` names and the device's random state; as in a fresh process until the first save."""

    def __init__(self) -> None:
        self._values: list[dict[str, Any]] = [
            {name: _fresh(getattr(module, name)) for name in names} for module, names in _HELD
        ]
        self._random_state: torch.Tensor | None = None  # None: whatever it is, the first load leaves it

    def save(self) -> None:
        self._values = [{name: getattr(module, name) for name in names} for module, names in _HELD]
        self._random_state = torch.cuda.get_rng_state()

    def load(self) -> None:
        for (module, _), values in zip(_HELD, self._values, strict=True):
            vars(module).update(values)
        if self._random_state is not None:
            torch.cuda.set_rng_state(self._random_state)


def _fresh(value: Any) -> Any:
    """What Megatron's global holds before anything is initialised: an empty dict, False or None."""
    if isinstance(value, dict):
        return {}
    return False if isinstance(value, bool) else None


_lock = threading.RLock()
_active = _Globals()  # of whoever runs outside every context
