"""Mini-batches: the rows of a batch that each optimizer step takes, the same for every data-parallel size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcontroller.data.protocol import DataProto
from mcontroller.errors import DataError, before_changes
from workers.config import ActorConfig, CriticConfig

__all__ = [
    "MiniBatch",
    "counted_sizes",
    "mini_batch_rows",
    "of_every_shard",
    "responses_of_mini_batch",
    "shuffle_generator",
]


def responses_of_mini_batch(config: ActorConfig | CriticConfig, data: DataProto, method: str) -> int:
    """Return the responses of a mini-batch over all data-parallel ranks.

    Args:
        config: ``ppo_mini_batch_prompts``, or ``ppo_mini_batch_size`` if that is 0.
        data: the batch; with ``ppo_mini_batch_prompts``, its ``meta_info["n"]`` is the responses to each prompt.
        method: the name of the called method, for error messages.

    Raises:
        DataError: ``meta_info`` has no ``n``, and it is needed.
    """
    if not config.ppo_mini_batch_prompts:
        return config.ppo_mini_batch_size
    n = data.meta_info.get("n")
    if not isinstance(n, int) or n < 1:
        raise DataError(
            f"{method}: meta_info['n'] is {n!r}; ppo_mini_batch_prompts={config.ppo_mini_batch_prompts} needs the "
            "number of responses to each prompt, which generate_sequences sets",
            method=method,
            value=n,
        )
    return config.ppo_mini_batch_prompts * n


class MiniBatch(NamedTuple):
    """The rows of one data-parallel shard that belong to a mini-batch.

    Attributes:
        rows: row numbers within the shard, int64.
        most: the most rows that any shard has in it.
        total: its rows in all shards together.
    """

    rows: Tensor
    most: int
    total: int


def mini_batch_rows(
    shard_sizes: Sequence[int], shard: int, mini_batch_size: int, generator: torch.Generator | None
) -> list[MiniBatch]:
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

    """
    total = sum(shard_sizes)
    count = -(-total // mini_batch_size)
    blocks = -(-total // count)
    owner = torch.arange(count).repeat(blocks)
    if generator is not None:
        owner = torch.rand(blocks, count, generator=generator).argsort(1).flatten()
    owner = owner[:total]
    per_shard = [torch.bincount(part, minlength=count) for part in owner.split(list(shard_sizes))]
    rows = torch.stack(per_shard)
    most, totals = rows.amax(0).tolist(), rows.sum(0).tolist()
    mine = owner.split(list(shard_sizes))[shard]
    return [MiniBatch((mine == index).nonzero().flatten(), most[index], totals[index]) for index in range(count)]


def shuffle_generator(seed: int | None, updates: int) -> torch.Generator | None:
    """Return the generator of an update's mini-batches, after a number of updates; None without a seed."""
    return None if seed is None else torch.Generator().manual_seed(seed * 1_000_003 + updates)


def counted_sizes(method: str, counted: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return the number of rows with a valid token of every data-parallel rank (a collective).

    Args:
        method: the name of the called method, for the error.
        counted: the number on this rank.
        group: the data-parallel ranks.
        device: of the collective.

    Raises:
        DataError: on every rank, if there are none.
    """
    sizes = of_every_shard(counted, group, device)
    if sum(sizes) == 0:
        with before_changes():
            raise DataError(f"{method}: no row of the batch has a valid token to learn from", method=method)
    return sizes


def of_every_shard(number: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return the ``number`` of every rank of ``group``, in their order (a collective).

    Args:
        number: that of this rank.
        group: the data-parallel ranks.
        device: of the collective.
    """
    numbers = torch.zeros(group.size(), dtype=torch.long, device=device)
    numbers[group.rank()] = number
    if group.size() > 1:
        dist.all_reduce(numbers, group=group)
    return numbers.tolist()
