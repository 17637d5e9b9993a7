"""Gather all weights of a model from any layout, and load them into any layout.

Every rank has the whole model in memory: for tests, small models, and comparisons of layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mcontroller.errors import DataError
from parallel_state.agreement import all_gather_values
from parallel_state.megatron import MegatronContext
from workers.weights.resharding import WholeTensors
from workers.weights.shards import named_shards

__all__ = ["full_state_dict", "load_full_state_dict"]


def full_state_dict(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> dict[str, torch.Tensor]:
    """Return every weight of the whole model by name, on the CPU, without padding (a collective).

    The result is the same on all ranks.
    """
    whole = WholeTensors(lambda: list(named_shards(chunks, context)))
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in whole}


@torch.no_grad()
def load_full_state_dict(
    chunks: Sequence[torch.nn.Module], context: MegatronContext, state: Mapping[str, torch.Tensor]
) -> None:
    """Copy this rank's parts of ``state`` into its weights (a collective).

    Args:
        chunks: this rank's model chunks, wrapped or not.
        context: the layout of the chunks.
        state: as ``full_state_dict`` returns it; the same on all ranks.

    Raises:
        DataError: on every rank, before anything is copied: the model has tensors that ``state`` lacks, or ``state``
            has tensors that the model lacks, or shapes differ.
    """
    shards = list(named_shards(chunks, context))
    of_ranks = all_gather_values({shard.name: shard.full_shape for shard in shards})
    shapes = {name: shape for theirs in of_ranks for name, shape in theirs.items()}
    missing = sorted(shapes.keys() - state.keys())
    unexpected = sorted(state.keys() - shapes.keys())
    differing = [
        f"{name} is {tuple(state[name].shape)}, the model's is {shapes[name]}"
        for name in sorted(shapes.keys() & state.keys())
        if tuple(state[name].shape) != shapes[name]
    ]
    if missing or unexpected or differing:
        raise DataError(
            f"the weights do not fit the model: missing {missing or 'none'}; unexpected {unexpected or 'none'}; "
            f"of another shape {differing or 'none'}",
            missing=missing,
            unexpected=unexpected,
            differing=differing,
        )
    for shard in shards:
        shard.param.copy_(shard.slice_of(state[shard.name]))
