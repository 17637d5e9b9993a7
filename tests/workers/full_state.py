"""All weights of a model by their names, gathered from any layout and loaded into any; on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from parallel_state.megatron import MegatronContext
from workers.weights.shards import named_shards
from workers.weights.whole_tensors import WholeTensors

__all__ = ["full_state_dict", "load_full_state_dict"]


def full_state_dict(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> dict[str, torch.Tensor]:
    """Return every weight of the whole model by name, on the CPU, without padding (a collective)."""
    whole = WholeTensors(lambda: list(named_shards(chunks, context)))
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in whole}


@torch.no_grad()
def load_full_state_dict(
    chunks: Sequence[torch.nn.Module], context: MegatronContext, state: Mapping[str, torch.Tensor]
) -> None:
    """Copy this rank's parts of ``state`` into its weights."""
    for shard in named_shards(chunks, context):
        shard.param.copy_(shard.slice_of(state[shard.part.name]))
