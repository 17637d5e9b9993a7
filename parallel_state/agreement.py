"""Raise one rank's error on all ranks, so that no rank waits in a collective for a rank that has failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from parallel_state.errors import MControllerError

T = TypeVar("T")

_TURN = timedelta(seconds=5)


def all_gather_values(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather a picklable value from every rank of a group (a collective).

    Args:
        value: this rank's value.
        group: the process group; None for all ranks.

    Returns:
        The values of all ranks, by rank within ``group``. Without a second rank, nothing is pickled.
    """
    values = [value] * dist.get_world_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def raise_on_every_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call ``function`` on every rank, and raise on all ranks if it fails on any (a collective).

    An exception that is not an MControllerError is a bug rather than bad input: it is raised on its own rank only.

    Args:
        function: called without arguments.
        group: the process group; None for all ranks.

    Returns:
        The result of ``function`` on this rank.

    Raises:
        MControllerError: the error of the first rank of ``group`` on which ``function`` raised one.
    """
    results: list[T] = []
    error: MControllerError | None = None
    try:
        results.append(function())
    except MControllerError as raised:
        error = raised
    for rank_error in all_gather_values(error, group):
        if rank_error is not None:
            raise rank_error
    return results[0]


def wait_for_every_rank(name: str) -> None:
    """Wait until all ranks have called this, through the store of the rendezvous.

    It is for work that takes one rank longer than a collective may take: NCCL ends a process whose collective waits for
    the others past the timeout of its group.

    Args:
        name: what the ranks wait for, the same on all of them. It can be used again.
    """
    world_size = dist.get_world_size()
    if world_size == 1:
        return
    store = c10d._get_default_store()
    key = f"mcontroller/wait/{name}"
    times, earlier = divmod(store.add(key, 1) - 1, world_size)
    if earlier == world_size - 1:
        store.delete_key(f"{key}/{times - 1}")
        store.set(f"{key}/{times}", "all")
    while not store.check([f"{key}/{times}"]):  # a wait blocks the store for all threads, also for those of NCCL
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"{key}/{times}"], _TURN)
