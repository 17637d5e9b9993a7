"""Mini-batches: the rows of a batch that each optimizer step takes, the same for every data-parallel size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcontroller.data.batch import DataProto
from mcontroller.errors import DataError, before_changes
from parallel_state.agreement import raise_on_every_rank
from workers.columns import MINI_BATCHES
from workers.config.roles import TrainedConfig
from workers.train.batches import TokenBatch


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


def draw_mini_batches(
    rows: int, mini_batch_size: int, epochs: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Return the mini-batch of each row of a batch in each epoch, int64 ``[rows, epochs]``.

    The rule applies to the whole batch and not to shards, so that every data-parallel size has the same mini-batches
    of the same batch. There are ``k = ceil(rows / mini_batch_size)`` of them, and of every ``k`` consecutive rows of
    the batch each mini-batch takes one: in order or, with a generator, in a random order drawn for every ``k`` rows.

    Args:
        rows: rows of the batch that have a valid token, on all ranks.
        mini_batch_size: rows of a mini-batch over all ranks.
        epochs: number of passes over the rows.
        generator: in the same state on every rank; None keeps the order of the rows.
    """
    count = -(-rows // mini_batch_size)
    blocks = -(-rows // count)
    passes = []
    for _ in range(epochs):
        owner = torch.arange(count).repeat(blocks)
        if generator is not None:
            owner = torch.rand(blocks, count, generator=generator).argsort(1).flatten()
        passes.append(owner[:rows])
    return torch.stack(passes, 1)


def configured_mini_batches(config: TrainedConfig, rows: int, n: int, update: int) -> Tensor:
    """Return the mini-batch of each row in each epoch of an update, int64 ``[rows, epochs]``, before it is called.

    A program that passes them as the column ``mini_batches`` of the update can order the rows as it likes, such as
    ``RayPPOTrainer``, which balances the tokens of every mini-batch over the data-parallel ranks.

    Args:
        config: of the actor or the critic.
        rows: rows of the batch that have a valid token, on all ranks.
        n: responses to each prompt.
        update: number of the update, from 0.
    """
    size = config.ppo_mini_batch_prompts * n or config.ppo_mini_batch_size
    return draw_mini_batches(
        rows, size, config.ppo_epochs, shuffle_generator(config.seed if config.shuffle else None, update)
    )


def shuffle_generator(seed: int | None, update: int) -> torch.Generator | None:
    """Return the generator of the mini-batches of an update, by its number; None without a seed."""
    return None if seed is None else torch.Generator().manual_seed((seed * 1_000_003 + update) % (1 << 63))


class Division(NamedTuple):
    """The division of the rows of an update into mini-batches.

    Attributes:
        given: the mini-batch of each row of this rank's shard in each epoch, int64 ``[rows, epochs]``. None:
            ``draw_mini_batches``, which takes the shards for consecutive parts of the batch.
        size: rows of a mini-batch over all ranks; None is all.
        epochs: number of passes over the rows.
        seed: every epoch draws its mini-batches from this and the number of the update; None keeps the order of the
            rows.
    """

    given: Tensor | None = None
    size: int | None = None
    epochs: int = 1
    seed: int | None = None


def division_of(config: TrainedConfig, data: DataProto, method: str) -> Division:
    """Return the division of a batch as configured, or by its column ``mini_batches``.

    Args:
        config: ``ppo_mini_batch_prompts``, or ``ppo_mini_batch_size`` if that is 0; epochs and seed.
        data: the batch; with ``ppo_mini_batch_prompts``, its ``meta_info["n"]`` is the responses to each prompt.
        method: the name of the called method, for error messages.

    Raises:
        DataError: ``meta_info`` has no ``n``, and it is needed.
    """
    size, n = config.ppo_mini_batch_size, data.meta_info.get("n")
    if config.ppo_mini_batch_prompts:
        if not isinstance(n, int) or n < 1:
            raise DataError(
                f"{method}: meta_info['n'] is {n!r}; ppo_mini_batch_prompts={config.ppo_mini_batch_prompts} needs the "
                "number of responses to each prompt, which generate_sequences sets",
                method=method,
                value=n,
            )
        size = config.ppo_mini_batch_prompts * n
    given = data.tensors().get(MINI_BATCHES)
    given = given.cpu() if isinstance(given, Tensor) else None
    return Division(given, size, config.ppo_epochs, config.seed if config.shuffle else None)


def mini_batches_of_update(
    method: str, rows: TokenBatch, division: Division, update: int, group: dist.ProcessGroup, device: torch.device
) -> list[MiniBatch]:
    """Return the rows of this rank in each mini-batch of an update, among its rows that count (a collective).

    Args:
        method: the name of the called method, for error messages.
        rows: of this rank; those that stay together are in one mini-batch.
        division: of the rows of all ranks.
        update: number of the update, from 0.
        group: the data-parallel ranks.
        device: of collectives.

    Raises:
        DataError: on every rank, if no row counts, or the mini-batches that are given do not fit.
    """
    counted, together = rows.counted, rows.together
    sizes = counted_sizes(method, int(counted.sum()), group, device)
    units, size = sum(sizes) // together, max((division.size or sum(sizes)) // together, 1)
    if division.given is None:
        by_row = draw_mini_batches(units, size, division.epochs, shuffle_generator(division.seed, update))
        mine = by_row.repeat_interleave(together, 0).split(sizes)[group.rank()]
    else:
        shape = len(counted), division.epochs
        with before_changes():
            given = raise_on_every_rank(functools.partial(checked, division.given, shape, together), group)
        mine = given[counted]
    gather = functools.partial(gather_numbers, group=group, device=device)
    return mini_batch_rows(mine, -(-units // size), gather)


def checked(mini_batches: Tensor, shape: tuple[int, int], together: int = 1) -> Tensor:
    """Return mini-batches that a caller gives.

    Raises:
        DataError: their shape is not ``shape``, which is ``[rows, epochs]``, or they part rows that stay together.
    """
    if tuple(mini_batches.shape) != shape:
        raise DataError(
            f"column mini_batches has the shape {list(mini_batches.shape)}; expected [rows, epochs], {list(shape)}",
            column="mini_batches",
        )
    units = mini_batches.view(-1, together, shape[1])
    if bool((units != units[:, :1]).any()):
        raise DataError(f"column mini_batches parts {together} rows that stay together", column="mini_batches")
    return mini_batches


def mini_batch_rows(mine: Tensor, count: int, gather: Callable[[Sequence[int]], list[list[int]]]) -> list[MiniBatch]:
    """Return the rows of a data-parallel shard in each mini-batch, one epoch after another (a collective).

    Args:
        mine: the mini-batch of each row of the shard in each epoch, int64 ``[rows, epochs]``; see
            ``draw_mini_batches``.
        count: number of mini-batches of an epoch.
        gather: returns the numbers that every data-parallel rank passes.

    Raises:
        DataError: on every rank, if a row is in no mini-batch.
    """
    wrong = (mine < 0) | (mine >= count)
    numbers = torch.where(wrong, 0, mine) + torch.arange(mine.size(1)) * count
    local = torch.bincount(numbers.flatten(), minlength=count * mine.size(1)).tolist()
    shards = gather([int(wrong.sum()), *local])
    outside = sum(shard[0] for shard in shards)
    if outside:
        with before_changes():
            raise DataError(
                f"column mini_batches has {outside} numbers outside of 0 to {count - 1} in rows that count: the "
                f"update has {count} mini-batches",
                column="mini_batches",
            )
    rows = torch.tensor(shards)[:, 1:]
    most, totals = rows.amax(0).tolist(), rows.sum(0).tolist()
    return [
        MiniBatch((mine[:, number // count] == number % count).nonzero().flatten(), most[number], totals[number])
        for number in range(len(totals))
    ]


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
    sizes = [size for (size,) in gather_numbers([counted], group, device)]
    if sum(sizes) == 0:
        with before_changes():
            raise DataError(f"{method}: no row of the batch has a valid token to learn from", method=method)
    return sizes


def gather_numbers(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Return the ``numbers`` of every rank of ``group``, in their order (a collective).

    Args:
        numbers: the numbers of this rank, as many on every rank.
        group: the data-parallel ranks.
        device: of the collective.
    """
    mine = torch.tensor([numbers], dtype=torch.long, device=device)
    every = mine.new_empty(group.size(), len(numbers)) if group.size() > 1 else mine
    if group.size() > 1:
        dist.all_gather_into_tensor(every, mine, group=group)
    return every.tolist()
