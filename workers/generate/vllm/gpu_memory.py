"""The part of a GPU that an engine may take: what is free beside the policy when the engine starts.

vLLM refuses to start if less than ``gpu_memory_utilization`` of a GPU is free, and fills what it asked for with keys
and values.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mcontroller.errors import ConfigError
from workers.config import ActorConfig, ParallelConfig
from workers.generate.vllm.checks import sequence_bytes
from workers.memory.estimate import PlannedRole, communicator_bytes

logger = logging.getLogger(__name__)

ENGINE_PROCESS_BYTES = 1 << 30
"""What an engine's process takes before vLLM looks at the free memory, and what it does not count: a CUDA context, the
workspaces of libraries, and fragmentation; a guess."""

_GB = 2**30


class GpuMemory(NamedTuple):
    """Bytes of one GPU.

    Attributes:
        free: what the driver reports.
        total: of the GPU.
        due: what the role of this process will allocate later, and keep while the engine generates.
    """

    free: int
    total: int
    due: int


def measured_memory(config: ActorConfig, world_size: int, pp_rank: int, *, trained: bool, models: int) -> GpuMemory:
    """Return the memory of this process's GPU, after torch's cache has been emptied.

    Args:
        config: of the actor and its rollout.
        world_size: ranks of the role.
        pp_rank: the pipeline stage of this rank.
        trained: whether the policy has an optimizer, whose state does not exist before the first step.
        models: models with the policy's parameters that the process has: 2 with a reference, 0 if another group trains.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if models == 0:
        return GpuMemory(free, total, 0)
    try:
        role = PlannedRole(config.model, config.parallel, world_size, config.optim if trained else None, ddp=config.ddp)
        idle = role.idle(pp_rank)
    except ConfigError as error:
        logger.warning("no memory is kept free for the optimizer next to vLLM's engine: %s", error)
        return GpuMemory(free, total, 0)
    kept = idle.total + (models - 1) * idle.parameters
    return GpuMemory(free, total, max(0, kept - torch.cuda.memory_allocated()))


def utilization(config: ActorConfig, gpus: Sequence[GpuMemory]) -> float:
    """Return vLLM's ``gpu_memory_utilization`` for an engine on these GPUs.

    Args:
        config: of the actor and its rollout.
        gpus: the GPUs of the engine, one for each of its ranks.

    Raises:
        ConfigError: the weights of the engine and one sequence do not fit beside the policy.
    """
    tp = config.rollout.vllm.tp
    own = ENGINE_PROCESS_BYTES + 2 * communicator_bytes(tp)
    room = [gpu.free - gpu.due - own for gpu in gpus]
    weights = _weights(config)
    needed = weights + (config.rollout.vllm.kv_cache_bytes or sequence_bytes(config))
    if min(room) < needed:
        gpu, left = min(zip(gpus, room, strict=True), key=lambda pair: pair[1])
        raise ConfigError(
            f"an engine of vLLM needs {needed / _GB:.2f} GB on each of its {tp} GPUs ({weights / _GB:.2f} of weights, "
            f"the rest for keys and values), and beside the policy there is room for {max(0, left) / _GB:.2f}: of "
            f"{gpu.total / _GB:.2f} GB are {gpu.free / _GB:.2f} free, the role will take another {gpu.due / _GB:.2f}, "
            f"and the engine's process {own / _GB:.2f}. Raise rollout.vllm.tp, divide the policy over more GPUs "
            "(parallel, optim.distributed_optimizer), or set rollout.vllm.options.gpu_memory_utilization",
            key="rollout.vllm.tp",
            value=tp,
        )
    return math.floor(1e4 * min(left / gpu.total for gpu, left in zip(gpus, room, strict=True))) / 1e4


def _weights(config: ActorConfig) -> int:
    """Bytes of the weights on each rank of an engine; 0 for a model whose parameters cannot be counted."""
    tp = config.rollout.vllm.tp
    try:
        return PlannedRole(config.model, ParallelConfig(tp=tp), tp).idle(0).parameters
    except ConfigError as error:
        logger.warning("whether vLLM's engine fits its GPUs is not known before it starts: %s", error)
        return 0
