"""The part of a GPU that an engine may take: what is free beside the policy when the engine starts.

vLLM refuses to start if less than ``gpu_memory_utilization`` of a GPU is free, and fills what it asked for with keys
and values.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mcontroller.errors import ConfigError
from workers.config import ActorConfig

logger = logging.getLogger(__name__)

CUDA_CONTEXT_BYTES = 1 << 29
"""Memory of a GPU that a process takes before its first tensor; a guess."""

LARGEST_SHARE = 0.92
"""The most of a GPU that an engine gets: vLLM's own default."""

_GB = 2**30
_MOMENTS = {"adam": ("exp_avg_dtype", "exp_avg_sq_dtype"), "sgd": ("exp_avg_dtype",)}
"""Optimizer -> the fields of Megatron's OptimizerConfig with the types of its moments."""


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


def measured_memory(config: ActorConfig, due: int) -> GpuMemory:
    """Return the memory of this process's GPU, after torch's cache has been emptied.

    Args:
        config: of the actor and its rollout.
        due: bytes that this process will allocate later, and keep while the engine generates.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    of_others = max(0, total - free - torch.cuda.memory_reserved() - CUDA_CONTEXT_BYTES)
    return GpuMemory(free, total, due + max(0, config.rollout.vllm.reserved_bytes - of_others))


def bytes_of_first_step(optimizer: Any) -> int:
    """Return the bytes on this GPU that Megatron's optimizer allocates in its first step: the moments of weights.

    Args:
        optimizer: of the policy, which has made no step; None if it is not trained.
    """
    size = 0
    for part in getattr(optimizer, "chained_optimizers", [] if optimizer is None else [optimizer]):
        if part.optimizer is None:  # this rank has none of its weights
            continue
        if part.config.optimizer not in _MOMENTS:
            logger.warning("no memory is kept free for the state of optim.optimizer=%s", part.config.optimizer)
            continue
        dtypes = [getattr(part.config, name) for name in _MOMENTS[part.config.optimizer]]
        weights = [weight for group in part.optimizer.param_groups for weight in group["params"]]
        size += sum(weight.numel() * dtype.itemsize for weight in weights if weight.is_cuda for dtype in dtypes)
    return size


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
        ConfigError: there is no room beside the policy, or less than the cache that was chosen. Whether weights and a
            sequence fit into it, vLLM checks.
    """
    tp = config.rollout.vllm.tp
    room = [gpu.free - gpu.due - margin(gpu.total, tp) for gpu in gpus]
    if min(room) <= config.rollout.vllm.kv_cache_bytes:
        gpu, left = min(zip(gpus, room, strict=True), key=lambda pair: pair[1])
        raise ConfigError(
            f"beside the policy there are {max(0, left) / _GB:.2f} GB for an engine of vLLM on one of its {tp} GPUs: "
            f"of {gpu.total / _GB:.2f} GB are {gpu.free / _GB:.2f} free, the policy will take another "
            f"{gpu.due / _GB:.2f}, and {margin(gpu.total, tp) / _GB:.2f} stay free. Raise rollout.vllm.tp, divide the "
            "policy over more GPUs (parallel, optim.distributed_optimizer), or set "
            "rollout.vllm.options.gpu_memory_utilization",
            key="rollout.vllm.tp",
            value=tp,
        )
    share = min(left / gpu.total for gpu, left in zip(gpus, room, strict=True))
    return math.floor(1e4 * min(share, LARGEST_SHARE)) / 1e4
