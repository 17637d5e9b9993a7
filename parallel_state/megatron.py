"""Initialize torch.distributed and Megatron's groups for a layout, and read this rank's coordinates from Megatron.

Megatron keeps its groups, its random-number tracker and a few caches in module globals: one layout per process. A
``MegatronContext`` is one layout's set of these globals. A process can have any number of contexts; inside
``with context.activate():`` Megatron sees the set of that context only. ``rank_state`` swaps the sets.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from parallel_state import cpu, releases
from parallel_state.errors import LayoutError, ParallelStateError
from parallel_state.infos import DistGlobalInfo, DistRankInfo
from parallel_state.layout import ParallelLayout
from parallel_state.patches import packed_rope, without_te
from parallel_state.patches.import_hook import patch_modules
from parallel_state.rank_state import Attributes, RankState, StatePart, StateSwitch, of_a_new_process
from parallel_state.requirements import require_importable

if not cpu.install():
    require_importable("transformer_engine")
    patch_modules(without_te.PATCHES | packed_rope.PATCHES | releases.PATCHES)

from megatron.core import parallel_state as mpu  # install() comes first
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random

EXPERT_INPUT_RNG = "expert-input-rng"
"""Name of the random state, in Megatron's tracker, for inputs of experts that all ranks of etp have: the same on them.

Megatron's own state of experts differs over etp, as inputs do that etp divides.
"""


def initialize_distributed(
    timeout_s: float = 600,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
) -> None:
    """Initialize torch.distributed in this process; do nothing if it runs with the same rank and world size.

    The backend is NCCL if CUDA is available; set the process's current CUDA device first then. Otherwise it is gloo.

    Args:
        timeout_s: seconds after which the rendezvous, or a collective on the default group, fails.
        rank: this process's rank; None for the environment variable RANK.
        world_size: the number of ranks; None for the environment variable WORLD_SIZE.
        init_method: the URL of the rendezvous; None for the environment variables MASTER_ADDR and MASTER_PORT.

    Raises:
        ParallelStateError: torch.distributed already runs in this process with another rank or world size.
    """
    if dist.is_initialized():
        running = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        requested = {"rank": rank, "world_size": world_size}
        if any(requested[name] not in (None, running[name]) for name in requested):
            raise ParallelStateError(
                f"torch.distributed runs in this process as rank {running['rank']} of {running['world_size']}; it "
                f"cannot also be rank {rank} of {world_size}: one process is one rank",
                **running,
            )
        return
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=init_method,
        rank=-1 if rank is None else rank,
        world_size=-1 if world_size is None else world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


class MegatronContext:
    """One layout's Megatron groups and random state in this process.

    The constructor is a collective: every rank of torch.distributed creates the same contexts in the same order.

    Args:
        layout: the sizes and order of the axes; its world size is torch.distributed's.
        seed: the seed of Megatron's random-number tracker and of the device's generator. Each context has its own
            state of both, so that the random numbers of one role do not depend on the other roles of the process.
        timeout_s: seconds after which a collective on one of the groups fails.

    Attributes:
        layout: as passed.
        pg: Megatron's process groups for the layout.

    Raises:
        ParallelStateError: torch.distributed is not initialized.
        LayoutError: the layout's world size is not torch.distributed's, or it has axes that Megatron does not have.
    """

    def __init__(self, layout: ParallelLayout, seed: int = 1234, *, timeout_s: float = 600) -> None:
        _check(layout)
        self.layout = layout
        self._state = RankState(layout_parts())
        with self.activate():
            mpu.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                order=_complete_order(layout),
                distributed_timeout_minutes=timeout_s / 60,  # Megatron passes it to timedelta, which accepts fractions
                create_gloo_process_groups=False,
            )
            _share_groups()
            megatron_random.model_parallel_cuda_manual_seed(seed)
            of_experts = seed + 1_000_003 + mpu.get_expert_model_parallel_rank()  # no seed of Megatron's own states
            megatron_random.get_cuda_rng_tracker().add(EXPERT_INPUT_RNG, of_experts)
            self.pg = ProcessGroupCollection.use_mpu_process_groups()

    @contextlib.contextmanager
    def activate(self) -> Iterator[MegatronContext]:
        """Return a context manager that sets Megatron's globals to this context's, and restores them at exit.

        Blocks can be nested, of the same context and of others. The block runs under a lock of the process: another
        thread that activates any context waits.
        """
        with context_switch.activate(self._state):
            yield self

    @property
    def is_active(self) -> bool:
        """Whether Megatron's globals are this context's now."""
        return context_switch.active is self._state

    def groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups of the layout that this rank is a member of, in the same order on every rank."""
        with self.activate():
            values = [vars(mpu)[name] for name in sorted(_parallel_state_names())]
        groups = [group for value in values for group in (value if isinstance(value, list) else [value])]
        return list({id(group): group for group in groups if isinstance(group, dist.ProcessGroup)}.values())

    def destroy(self) -> None:
        """Destroy the process groups of the layout, and with them the communicators of NCCL and their buffers.

        Every rank of torch.distributed destroys the same contexts in the same order. Neither the context nor a model
        that was built with it can be used afterwards.
        """
        for group in self.groups():
            dist.destroy_process_group(group)
        with self.activate():
            mpu.destroy_model_parallel()

    def rank_info(self) -> DistRankInfo:
        """Return the index of this rank on each axis, as Megatron's getters report it."""
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
        """Return the size of each axis, as Megatron's getters report it."""
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
        raise ParallelStateError("torch.distributed is not initialized: call initialize_distributed() first")
    if layout.world_size != dist.get_world_size():
        raise LayoutError(
            f"the layout has {layout.world_size} ranks and torch.distributed {dist.get_world_size()}; expected the "
            "same number, because a context covers all ranks",
            layout_world_size=layout.world_size,
            world_size=dist.get_world_size(),
        )
    if layout.extra:
        raise LayoutError(
            f"Megatron has no axis {', '.join(map(repr, layout.extra))}; it has tp, pp, cp, dp, ep, etp and vpp",
            axes=tuple(layout.extra),
        )


def _complete_order(layout: ParallelLayout) -> str:
    """Return the order with the axes of size 1 that it leaves out; megatron-core 0.19 requires tp in it."""
    named = layout.order.split("-")
    return "-".join([*named, *(axis for axis in ("tp", "cp", "ep", "dp", "pp") if axis not in named)])


def _share_groups() -> None:
    """Use the groups also as Megatron's second set of groups, which it takes from gloo on a GPU.

    ``get_megatron_optimizer`` asks for the second set unless it is told not to. Only collectives on tensors of the host
    need gloo, and neither the steps of an optimizer nor distributed checkpoints make one.
    """
    for name, group in vars(mpu).items():
        if name.endswith("_GLOO") and group is None:
            setattr(mpu, name, getattr(mpu, name.removesuffix("_GLOO")))


def _parallel_state_names() -> list[str]:
    return [name for name in vars(mpu) if re.fullmatch(r"_[A-Z][A-Z_]*|_global_process_group_list", name)]


# All globals of Megatron that belong to one layout.
_LAYOUT_GLOBALS = tuple(
    Attributes(module, names, of_a_new_process)
    for module, names in (
        (mpu, tuple(_parallel_state_names())),
        (megatron_random, ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED")),
        releases.moe_metrics(),
    )
)


def new_context_switch() -> StateSwitch:
    """Return a switch between the contexts of one rank; none of them is active."""
    return StateSwitch(layout_parts())


def layout_parts() -> list[StatePart]:
    """Return the state of Megatron that belongs to one layout, as that of a new process, and the device's generator."""
    return [*_LAYOUT_GLOBALS, _TrainingGlobals(), _DeviceGenerator()]


class _TrainingGlobals:
    """What ``initialize_megatron`` of Megatron-LM's training code sets: its arguments, timers, tokenizer, and counters.

    A new context begins with those that the process has.
    """

    _MODULES = (
        "megatron.training.global_vars",
        "megatron.core.num_microbatches_calculator",
        "megatron.core.rerun_state_machine",
    )

    def fresh(self) -> dict[tuple[str, str], Any]:
        return self.read()

    def read(self) -> dict[tuple[str, str], Any]:
        modules = [module for module in map(sys.modules.get, self._MODULES) if module is not None]
        return {
            (module.__name__, name): vars(module)[name]
            for module in modules
            for name in _training_globals(module, len(vars(module)))
        }

    def write(self, value: dict[tuple[str, str], Any]) -> None:
        for (name, attribute), setting in (dict.fromkeys(self.read()) | value).items():
            if (module := sys.modules.get(name)) is not None:  # a rank that imports it for itself has it later
                vars(module)[attribute] = setting


@cache
def _training_globals(module: ModuleType, size: int) -> list[str]:
    """Return the names in a module that Megatron-LM's training code sets, while the module has ``size`` names."""
    return [name for name in vars(module) if name.startswith("_GLOBAL_")]


class _DeviceGenerator:
    """The random state of the device; a new context leaves it as it is until it saves its own."""

    def fresh(self) -> torch.Tensor | None:
        return None

    def read(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state()

    def write(self, value: torch.Tensor | None) -> None:
        if value is not None:
            torch.cuda.set_rng_state(value)


context_switch = new_context_switch()
"""Which context is active on the rank of this process."""
