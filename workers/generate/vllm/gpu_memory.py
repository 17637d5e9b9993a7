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
from workers.memory.estimate import PlannedRole

logger = logging.getLogger(__name__)

CUDA_CONTEXT_BYTES = 1 << 29
"""Memory of a GPU that a process takes before its first tensor; a guess."""

LARGEST_SHARE = 0.92
"""The most of a GPU that an engine gets: vLLM's own default."""

_GB = 2**30


class GpuMemory(NamedTuple):
    """Bytes of one GPU.

    Attributes:
        free: what the driver reports.
        total: of the GPU.
        due: what this process and others will allocate later, and keep while the engine generates.
    """

    free: int
    total: int
    due: int


def measured_memory(
    config: ActorConfig, world_size: int, pp_rank: int, *, trained: bool, models: int, resident: bool
) -> GpuMemory:
    """Return the memory of this process's GPU, after torch's cache has been emptied.

    Args:
        config: of the actor and its rollout.
        world_size: ranks of the role.
        pp_rank: the pipeline stage of this rank.
        trained: whether the policy has an optimizer, whose state does not exist before the first step.
        models: models with the policy's parameters that the process has: 2 with a reference, 0 if another group trains.
        resident: whether they are on the GPU while the engine generates; otherwise only the buffers of NCCL are.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    of_others = max(0, total - free - torch.cuda.memory_reserved() - CUDA_CONTEXT_BYTES)
    due = max(0, config.rollout.vllm.reserved_bytes - of_others)
    if models == 0:
        return GpuMemory(free, total, due)
    try:
        role = PlannedRole(config.model, config.parallel, world_size, config.optim if trained else None, ddp=config.ddp)
        idle = role.idle(pp_rank)
    except ConfigError as error:
        logger.warning("no memory is kept free for the optimizer next to vLLM's engine: %s", error)
        return GpuMemory(free, total, due)
    kept = idle.total + (models - 1) * idle.parameters if resident else idle.nccl
    return GpuMemory(free, total, due + max(0, kept - torch.cuda.memory_allocated()))


def margin(total: int, tp: int) -> int:
    """Return the bytes to leave free on a GPU of ``total`` bytes beside an engine of ``tp`` ranks."""
    # vLLM fills its share to the last block of keys and values, and its profile of the rest leaves out: the context of
    # CUDA and the workspaces of libraries (about 1 GB), a copy in float32 of the logits (0.6 GB for 1024 rows of 152k
    # tokens), fragmentation, which grows with the GPU, and with several ranks NCCL's buffers, of which pairs are opened
    # lazily.
    return max(2 * _GB, total * 4 // 100) + 3 * _GB * tp // 10


def utilization(config: ActorConfig, gpus: Sequence[GpuMemory]) -> float:
    """Return vLLM's ``gpu_memory_utilization`` for an engine on these GPUs.

    Args:
        config: of the actor and its rollout.
        gpus: the GPUs of the engine, one for each of its ranks.

    Raises:
        ConfigError: the weights of the engine and one sequence do not fit beside the policy.
    """
    tp = config.rollout.vllm.tp
    room = [gpu.free - gpu.due - margin(gpu.total, tp) for gpu in gpus]
    weights = _weights(config)
    needed = weights + (config.rollout.vllm.kv_cache_bytes or sequence_bytes(config))
    if min(room) < needed:
        gpu, left = min(zip(gpus, room, strict=True), key=lambda pair: pair[1])
        raise ConfigError(
            f"an engine of vLLM needs {needed / _GB:.2f} GB on each of its {tp} GPUs ({weights / _GB:.2f} of weights, "
            f"the rest for keys and values), and beside the policy there is room for {max(0, left) / _GB:.2f}: of "
            f"{gpu.total / _GB:.2f} GB are {gpu.free / _GB:.2f} free, roles will take another {gpu.due / _GB:.2f}, "
            f"and {margin(gpu.total, tp) / _GB:.2f} stay free. Raise rollout.vllm.tp, divide the policy over more GPUs "
            "(parallel, optim.distributed_optimizer), or set rollout.vllm.options.gpu_memory_utilization",
            key="rollout.vllm.tp",
            value=tp,
        )
    share = min(left / gpu.total for gpu, left in zip(gpus, room, strict=True))
    return math.floor(1e4 * min(share, LARGEST_SHARE)) / 1e4


def _weights(config: ActorConfig) -> int:
    """Bytes of the weights on each rank of an engine; 0 for a model whose parameters cannot be counted."""
    tp = config.rollout.vllm.tp
    try:
        return PlannedRole(config.model, ParallelConfig(tp=tp), tp).idle(0).parameters
    except ConfigError as error:
        logger.warning("whether vLLM's engine fits its GPUs is not known before it starts: %s", error)
        return 0
