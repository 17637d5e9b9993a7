"""Draw initial weights that depend only on the seed and the tensor's name, and not on the layout."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from parallel_state.megatron import MegatronContext
from workers.weights.shards import WeightShard, named_shards

_MOST_THREADS = 8
"""Each thread has a whole tensor in memory."""

# Megatron scales the last linear of each residual branch down by the number of layers.
_OUTPUT_LINEARS = (".linear_proj.", ".linear_fc2.", ".out_proj.")
_DECAY = ".A_log"  # of the state of a Mamba layer: drawn between 1 and 16


@torch.no_grad()
def initialize_weights(
    chunks: Sequence[torch.nn.Module], context: MegatronContext, seed: int, only: Set[str] | None = None
) -> None:
    """Fill every weight matrix of these chunks with Megatron's distributions, the same in every layout.

    The whole tensor is drawn in float32 on the CPU, from a generator seeded by ``seed`` and the tensor's name in the
    whole model, and this rank keeps its part: the same model in every layout, on every device. Threads draw several
    tensors at once, because torch draws the numbers of a tensor on one. Norms and other vectors stay as they were
    built; biases become 0.

    Args:
        chunks: this rank's model chunks.
        context: the layout of the chunks.
        seed: determines all weights.
        only: names in the whole model of the tensors to fill; None fills all.
    """
    if next((parameter.is_meta for chunk in chunks for parameter in chunk.parameters()), False):
        return  # a dry run has no values
    matrices: list[tuple[WeightShard, TransformerConfig]] = []
    for chunk in chunks:
        for shard in named_shards([chunk], context):
            if only is not None and shard.part.name not in only:
                continue
            if shard.param.dim() >= 2 or shard.part.name.endswith(_DECAY):
                matrices.append((shard, get_model_config(chunk)))
            elif shard.part.name.endswith("bias"):
                shard.param.zero_()
    threads = _threads()
    with ThreadPoolExecutor(threads, thread_name_prefix="initialize") as pool:
        for start in range(0, len(matrices), threads):  # so many whole tensors are in memory
            some = matrices[start : start + threads]
            drawn = pool.map(lambda matrix: _initial_values(matrix[0], matrix[1], seed), some)
            for (shard, _), values in zip(some, drawn, strict=True):
                shard.param.copy_(values)


def _threads() -> int:
    """This rank's part of the CPUs of its node, which has at most as many ranks as this process sees GPUs."""
    ranks_of_node = torch.cuda.device_count() if torch.cuda.is_available() else dist.get_world_size()
    return min(max(len(os.sched_getaffinity(0)) // ranks_of_node, 1), _MOST_THREADS)


def _initial_values(shard: WeightShard, config: TransformerConfig, seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}/{shard.part.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    full = torch.empty(shard.part.shape, dtype=torch.float32, device="cpu")
    _method(shard.part.name, config)(full, generator=generator)
    return shard.slice_of(full)


def _method(name: str, config: TransformerConfig) -> Callable[..., Any]:
    if name.endswith(_DECAY):
        return lambda tensor, generator: tensor.uniform_(1.0, 16.0, generator=generator).log_()
    if any(linear in name for linear in _OUTPUT_LINEARS):
        return config.output_layer_init_method
    return config.embedding_init_method if name.startswith("embedding.") else config.init_method
