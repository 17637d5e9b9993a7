"""What one rank finds wrong is raised on all: none waits in a collective for one that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from parallel_state.errors import MControllerError

__all__ = ["everyones", "on_every_rank"]

T = TypeVar("T")


def everyones(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of every rank of ``group`` (None: all), in its order (a collective)."""
    everyone = [mine] * dist.get_world_size(group)
    if len(everyone) > 1:
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


def on_every_rank(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What ``make`` gives here; an MControllerError of any rank of ``group`` (None: all) is raised on all (a collective)."""
    made: list[T] = []
    failure = None
    try:
        made.append(make())
    except MControllerError as error:
        failure = error
    for found in everyones(failure, group):
        if found is not None:
            raise found
    return made[0]
