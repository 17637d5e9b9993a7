"""Worker groups of simulated ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcontroller import ClassWithInitArgs, Dispatch, DispatchError, GroupBroken, Worker, WorkerError, register
from mcontroller.testing import SimulatedGroupMaker, simulated_worker_group
from parallel_state.layout import ParallelLayout
from parallel_state.simulated import CommunicationTrace, Deadlock


class Counter(Worker):
    """Ranks that add up what they get."""

    def __init__(self, bias: int = 0) -> None:
        dist.init_process_group("gloo")
        self.bias = bias

    @register(Dispatch.DP_COMPUTE)
    def total(self, value: int) -> int:
        dist.all_reduce(counted := torch.tensor(value + self.bias))
        return int(counted)

    @register(Dispatch.ONE_TO_ALL)
    def skip(self, rank: int) -> None:
        if self.rank != rank:
            dist.barrier()

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("loss is nan")
        dist.barrier()


def test_ranks_of_a_group_communicate_and_keep_their_state(simulated_group: SimulatedGroupMaker) -> None:
    trace = CommunicationTrace()
    group = simulated_group(Counter, ParallelLayout(4), bias=1, trace=trace)
    assert group.total([1, 2, 3, 4]) == [14] * 4
    assert group.total([0, 0, 0, 1]) == [5] * 4
    assert [transfer.rank for transfer in trace.select(operation="all_reduce", axis="dp")] == [0, 1, 2, 3] * 2
    assert not dist.is_initialized()


def test_two_groups_take_turns(simulated_group: SimulatedGroupMaker) -> None:
    one, other = simulated_group(Counter, 2), simulated_group(Counter, 3, bias=10)
    assert (one.total([1, 2]), other.total([1, 2, 3]), one.total([3, 4])) == ([3] * 2, [36] * 3, [7] * 2)


def test_a_deadlock_is_raised_by_the_call_and_breaks_the_group() -> None:
    before = threading.active_count()
    group = simulated_worker_group(Counter, 4, name="actor")
    with pytest.raises(Deadlock, match=r"^rank 2 \(dp=2\) has ended, and rank 0 waits for it"):
        group.skip(2)
    with pytest.raises(GroupBroken, match="rank 2"):
        group.total([1, 2, 3, 4])
    group.shutdown()
    assert threading.active_count() == before


def test_an_exception_is_a_worker_error_of_its_rank_with_the_positions_of_the_others() -> None:
    group: Any = simulated_worker_group(Counter, 3, name="actor")
    with pytest.raises(WorkerError, match=r"actor rank 1 .*ValueError: loss is nan") as caught:
        group.fail(1)
    assert caught.value.rank == 1
    assert "rank 0 (dp=0): barrier()" in caught.value.worker_traceback


def test_arguments_next_to_a_class_with_arguments_are_rejected() -> None:
    with pytest.raises(DispatchError, match="has its arguments"):
        simulated_worker_group(ClassWithInitArgs(Counter, 1), 2, 3)
