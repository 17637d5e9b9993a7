"""Gather all weights of a model from any layout, and load them into any layout.

Every rank has the whole model in memory for a moment: for tests, small models, and comparisons of layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from mcontroller.errors import DataError
from parallel_state.megatron import MegatronContext
from workers.weights.shards import named_shards

__all__ = ["full_state_dict", "load_full_state_dict"]


@torch.no_grad()
def full_state_dict(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> dict[str, torch.Tensor]:
    """Return every weight of the whole model by name, on the CPU, without padding (a collective).

    The result is the same on all ranks.
    """
    mine: dict[str, torch.Tensor] = {}
    for shard in named_shards(chunks, context):
        parts = [shard.param.data]
        if shard.dim is not None:
            parts = [torch.empty_like(shard.param.data) for _ in range(shard.group.size())]
            dist.all_gather(parts, shard.param.data.contiguous(), group=shard.group)
        replica_of = (context.pg.expt_dp, context.pg.expt_tp) if shard.expert else (context.pg.dp_cp, context.pg.tp)
        if all(group.rank() == 0 for group in replica_of):
            mine[shard.name] = shard.join(parts).cpu()
    everyone: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return {name: tensor for theirs in everyone for name, tensor in theirs.items()}


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
    everyone: list[dict[str, tuple[int, ...]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, {shard.name: shard.full_shape for shard in shards})
    shapes = {name: shape for theirs in everyone for name, shape in theirs.items()}
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
