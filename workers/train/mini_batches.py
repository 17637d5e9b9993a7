"""Mini-batches: the rows of a batch that each optimizer step takes, the same for every data-parallel size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["mini_batch_rows"]


def mini_batch_rows(
    shard_sizes: Sequence[int], shard: int, mini_batch_size: int, generator: torch.Generator | None
) -> list[tuple[Tensor, int]]:
    """Return the rows of one data-parallel shard that belong to each mini-batch.

    The rule applies to the whole batch and not to shards, so that every data-parallel size has the same mini-batches
    of the same batch. There are ``k = ceil(rows / mini_batch_size)`` of them, and of every ``k`` consecutive rows of
    the batch each mini-batch takes one: in order or, with a generator, in a random order drawn for every ``k`` rows.
    Consecutive shards of equal size therefore have equally many rows of every mini-batch.

    Args:
        shard_sizes: rows of each data-parallel rank, in the order of the batch.
        shard: the data-parallel rank whose rows are returned.
        mini_batch_size: rows of a mini-batch over all ranks.
        generator: in the same state on every rank; None keeps the order of the rows.

    Returns:
        For each mini-batch, row numbers within the shard (int64), and the most rows that any shard has in it.
    """
    total = sum(shard_sizes)
    count = -(-total // mini_batch_size)
    blocks = -(-total // count)
    owner = torch.arange(count).repeat(blocks)
    if generator is not None:
        owner = torch.rand(blocks, count, generator=generator).argsort(1).flatten()
    owner = owner[:total]
    per_shard = [torch.bincount(part, minlength=count) for part in owner.split(list(shard_sizes))]
    most = torch.stack(per_shard).amax(0).tolist()
    mine = owner.split(list(shard_sizes))[shard]
    return [((mine == index).nonzero().flatten(), most[index]) for index in range(count)]
