"""Draw initial weights that depend only on the seed and the tensor's name, and not on the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from parallel_state.megatron import MegatronContext
from workers.weights.shards import WeightShard, named_shards

__all__ = ["initialize_weights"]

# Megatron scales the last linear of each residual branch down by the number of layers.
_OUTPUT_LINEARS = (".linear_proj.", ".linear_fc2.")


@torch.no_grad()
def initialize_weights(
    chunks: Sequence[torch.nn.Module], context: MegatronContext, seed: int, only: Set[str] | None = None
) -> None:
    """Fill every weight matrix of these chunks with Megatron's distributions, the same in every layout.

    The whole tensor is drawn in float32 on the CPU, from a generator seeded by ``seed`` and the tensor's name in the
    whole model, and this rank keeps its part: the same model in every layout, on every device. Norms and other vectors
    stay as they were built; biases become 0.

    Args:
        chunks: this rank's model chunks.
        context: the layout of the chunks.
        seed: determines all weights.
        only: names in the whole model of the tensors to fill; None fills all.
    """
    for chunk in chunks:
        config = get_model_config(chunk)
        for shard in named_shards([chunk], context):
            if only is not None and shard.name not in only:
                continue
            if shard.param.dim() >= 2:
                shard.param.copy_(shard.slice_of(_drawn(shard, config, seed)))
            elif shard.name.endswith("bias"):
                shard.param.zero_()


def _drawn(shard: WeightShard, config: TransformerConfig, seed: int) -> torch.Tensor:
    full = torch.empty(shard.full_shape, dtype=torch.float32, device="cpu")
    digest = hashlib.sha256(f"{seed}/{shard.name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:8]) >> 1)
        _method(shard.name, config)(full)
    return full


def _method(name: str, config: TransformerConfig) -> Callable[[torch.Tensor], Any]:
    if any(linear in name for linear in _OUTPUT_LINEARS):
        return config.output_layer_init_method
    return config.embedding_init_method if name.startswith("embedding.") else config.init_method
