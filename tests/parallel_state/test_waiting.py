"""Ranks wait for each other without a collective, again and again under one name."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from parallel_state.agreement import wait_for_every_rank
from tests.forking import run_ranks

pytestmark = pytest.mark.processes


def all_arrived(times: int) -> list[bool]:
    """Whether all ranks had arrived when this one went on, and whether the marks of earlier times are gone."""
    store, rank, ranks = c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    answers = []
    for number in range(times):
        store.set(f"{number}/{rank}", "here")
        wait_for_every_rank("work")
        answers.append(store.check([f"{number}/{other}" for other in range(ranks)]))
        answers.append(not store.check([f"mcontroller/wait/work/{number - 1}"]))
    return answers


def test_ranks_go_on_when_all_have_arrived() -> None:
    assert run_ranks(all_arrived, 3, 4) == [[True] * 8] * 3
