"""Worker groups of simulated ranks."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from mcontroller import ClassWithInitArgs, Dispatch, DispatchError, GroupBroken, Worker, WorkerError, register
from mcontroller.testing import SimulatedGroupMaker, simulated_worker_group
from parallel_state.layout import ParallelLayout
from parallel_state.simulated import (
    AsyncAccessError,
    CollectiveMismatch,
    CommunicationTrace,
    Deadlock,
    Disagreement,
    NonMemberError,
    UnfinishedCalls,
    UnsupportedError,
    require_different,
    require_equal,
)
from tests.process_state import state_of_this_process


class WithoutGroups(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def rank_on_tp(self) -> int:
        return mpu.get_tensor_model_parallel_rank()


def test_a_worker_without_megatron_groups_is_told_who_makes_them() -> None:
    group = simulated_worker_group(WithoutGroups, ParallelLayout(4, tp=2))
    with pytest.raises(WorkerError) as caught:
        group.rank_on_tp()
    assert caught.value.method == "rank_on_tp"
    assert "WithoutGroups" in caught.value.cause and "MegatronWorker" in caught.value.cause


class Faulty(Worker):
    """Ranks of which one has a bug in every method."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")

    @register(Dispatch.ONE_TO_ALL)
    def other_shape(self) -> None:
        dist.all_reduce(torch.zeros(3 if self.rank == 1 else 2))

    @register(Dispatch.ONE_TO_ALL)
    def other_order_of_groups(self) -> None:
        for ranks in ([0, 1], [2, 3])[:: -1 if self.rank == 1 else 1]:
            dist.new_group(ranks)

    @register(Dispatch.ONE_TO_ALL)
    def not_a_member(self) -> None:
        dist.all_reduce(torch.zeros(1), group=dist.new_group([0, 2, 3]))

    @register(Dispatch.ONE_TO_ALL)
    def changed_before_the_wait(self) -> None:
        work = dist.all_reduce(gradient := torch.ones(2), async_op=True)
        gradient.mul_(1 + (self.rank == 1))
        work.wait()

    @register(Dispatch.ONE_TO_ALL)
    def unequal_parameters(self) -> None:
        require_equal({"weight": torch.full((2,), float(self.rank == 1))}, what="parameters")

    @register(Dispatch.ONE_TO_ALL)
    def equal_seeds(self) -> None:
        require_different(torch.tensor(self.rank // 2 + 2 * (self.rank == 3)), what="seeds")

    @register(Dispatch.ONE_TO_ALL)
    def one_call_more(self) -> None:
        if self.rank != 1:
            dist.all_reduce(torch.zeros(1), async_op=True)

    @register(Dispatch.ONE_TO_ALL)
    def thread(self) -> None:
        group = dist.group.WORLD
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.zeros(1), group=group), name="prefetch")
        thread.start()
        thread.join()

    @register(Dispatch.ONE_TO_ALL)
    def stream(self) -> None:
        torch.cuda.Stream()

    @register(Dispatch.ONE_TO_ALL)
    def fork(self) -> None:
        multiprocessing.get_context("fork").Process(target=print).start()

    @register(Dispatch.ONE_TO_ALL)
    def interrupted(self) -> None:
        if self.rank == 1:
            signal.raise_signal(signal.SIGINT)
        while True:
            dist.barrier()


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
    with pytest.raises(Deadlock) as caught:
        group.skip(2)
    assert str(caught.value).startswith("rank 2 (dp=2) ")
    with pytest.raises(GroupBroken) as broken:
        group.total([1, 2, 3, 4])
    assert broken.value.first_cause is caught.value
    group.shutdown()
    assert threading.active_count() == before


def test_an_exception_is_a_worker_error_with_the_positions_of_other_ranks() -> None:
    group: Any = simulated_worker_group(Counter, 3, name="actor")
    with pytest.raises(WorkerError) as caught:
        group.fail(1)
    assert (caught.value.role, caught.value.rank, caught.value.cause) == ("actor", 1, "ValueError: loss is nan")
    assert "rank 0 (dp=0): barrier()" in caught.value.worker_traceback


@pytest.mark.processes
@pytest.mark.simulated
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("method", "kind", "named"),
    [
        ("other_shape", CollectiveMismatch, "[3]"),
        ("other_order_of_groups", CollectiveMismatch, "new_group([2, 3])"),
        ("not_a_member", NonMemberError, "rank 1 (dp=1)"),
        ("changed_before_the_wait", AsyncAccessError, "rank 1 (dp=1)"),
        ("unequal_parameters", Disagreement, "[0, 2, 3]"),
        ("equal_seeds", Disagreement, "seeds"),
        ("one_call_more", UnfinishedCalls, "rank 1 (dp=1)"),
        ("thread", UnsupportedError, "'prefetch'"),
        ("stream", UnsupportedError, "torch.cuda.Stream"),
        ("fork", UnsupportedError, "rank 0 (dp=0)"),
        ("interrupted", KeyboardInterrupt, ""),
    ],
)
def test_a_bug_of_a_worker_is_reported_and_leaves_nothing_behind(
    method: str, kind: type[BaseException], named: str
) -> None:
    before = state_of_this_process()
    with simulated_worker_group(Faulty, 4) as group:
        with pytest.raises(kind) as caught:
            getattr(group, method)()
        assert state_of_this_process() == before
        with pytest.raises(GroupBroken):
            group.other_shape()
    assert type(caught.value) is kind
    assert named in str(caught.value)
    assert state_of_this_process() == before


def test_changes_before_the_wait_are_allowed_without_their_check(simulated_group: SimulatedGroupMaker) -> None:
    simulated_group(Faulty, 4, check_async=False).changed_before_the_wait()


@pytest.mark.processes
@pytest.mark.simulated
class Broken(Counter):
    def __init__(self) -> None:
        super().__init__()
        _ = 1 / (self.bias * 0)


def test_a_constructor_that_fails_leaves_nothing_behind() -> None:
    before = state_of_this_process()
    with pytest.raises(WorkerError) as caught:
        simulated_worker_group(ClassWithInitArgs(Broken), 4)
    assert caught.value.cause.startswith("ZeroDivisionError")
    assert state_of_this_process() == before


def test_arguments_next_to_a_class_with_arguments_are_rejected() -> None:
    with pytest.raises(DispatchError):
        simulated_worker_group(ClassWithInitArgs(Counter, 1), 2, 3)
