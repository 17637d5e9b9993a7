"""Programs with a bug, and the reports of simulated ranks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from parallel_state.agreement import wait_for_every_rank
from parallel_state.errors import LayoutError
from parallel_state.layout import ParallelLayout
from parallel_state.simulated import (
    AsyncAccessError,
    CollectiveMismatch,
    Deadlock,
    Disagreement,
    GroupOrderError,
    KeyNotSet,
    NonMemberError,
    SimulationError,
    UnfinishedCalls,
    UnsupportedError,
    require_different,
    require_equal,
    run_ranks,
    scheduler,
)
from tests.process_state import state_of_this_process

pytestmark = [pytest.mark.processes, pytest.mark.simulated]

LAYOUT = ParallelLayout(8, tp=2, pp=2)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    before = state_of_this_process()
    yield
    assert state_of_this_process() == before


def report(kind: type[SimulationError], layout: Any, function: Callable[..., Any], **options: Any) -> SimulationError:
    with pytest.raises(kind) as caught:
        run_ranks(layout, function, **options)
    assert type(caught.value) is kind
    return caught.value


def rank_in(*ranks: int) -> bool:
    return dist.get_rank() in ranks


def test_a_deadlock_begins_with_the_rank_that_ended_and_has_all_lines() -> None:
    from megatron.core import parallel_state as mpu

    def skips() -> None:
        loss = torch.full((4,), float(dist.get_rank()))
        dist.all_reduce(loss, group=mpu.get_tensor_model_parallel_group())
        if not (mpu.get_data_parallel_rank() == 1 and loss[0] > 10):
            dist.all_reduce(loss, group=mpu.get_data_parallel_group())
        dist.all_reduce(loss, group=mpu.get_pipeline_model_parallel_group())

    error = report(Deadlock, LAYOUT, skips)
    text = str(error)
    assert text.startswith("rank 6 (tp=0 dp=1 pp=1) has ended, and rank 4 waits for it\n")
    assert error.ranks == (6, 4)
    assert (
        "rank 4 (tp=0 dp=0 pp=1): all_reduce(float32[4], op=SUM), call 0 on group DATA_PARALLEL_GROUP [4, 6]\n"
        "    at tests/parallel_state/simulated/test_reports.py:"
    ) in text
    assert "    waits for rank 6 (tp=0 dp=1 pp=1), which has ended\n        and has not called any collective" in text


def test_a_call_made_while_an_exception_is_handled_has_it_in_a_note() -> None:
    def computes() -> None:
        try:
            if rank_in(2):
                raise ValueError("loss is nan")
            dist.all_reduce(torch.zeros(1))
        finally:
            dist.barrier()

    error = report(CollectiveMismatch, 4, computes)
    assert error.ranks == (0, 2)
    (note,) = error.__notes__
    line = computes.__code__.co_firstlineno + 3
    assert note.startswith("rank 2 ") and "ValueError: loss is nan\n" in note
    assert note.endswith(f"at {os.path.relpath(__file__)}:{line} in computes")


def test_an_error_of_one_rank_has_the_positions_of_the_others() -> None:
    with pytest.raises(ValueError, match="with root 4, and the group has 4 ranks") as caught:
        run_ranks(4, lambda: dist.broadcast(torch.zeros(1), src=4) if rank_in(1) else dist.barrier())
    (note,) = caught.value.__notes__
    assert note.startswith("raised on rank 1; then:\nranks [2, 3]: can go on\nrank 0: barrier(), call 0 on group")
    with pytest.raises(ValueError, match="with rank 4, and the group has 4 ranks"):
        run_ranks(4, lambda: dist.send(torch.zeros(1), dst=4))


def test_a_cycle_is_named_as_the_cause() -> None:
    def send_first() -> None:
        dist.send(torch.zeros(1), 1 - dist.get_rank())
        dist.recv(torch.zeros(1), 1 - dist.get_rank())

    error = report(Deadlock, 2, send_first)
    assert str(error).startswith("ranks wait for each other: 0 -> 1 -> 0\n")
    assert set(error.ranks) == {0, 1}


def test_ranks_with_the_same_story_are_one_entry() -> None:
    error = report(Deadlock, 64, lambda: None if rank_in(9) else dist.barrier())
    assert str(error).count("barrier()") == 1
    assert "ranks [0, 1, 2, 3, ..., 63] (63 ranks): barrier()" in str(error)


def test_a_key_that_no_rank_sets_is_the_cause_for_ranks_in_collectives_too() -> None:
    def wait() -> None:
        if rank_in(2):
            c10d._get_default_store().wait(["never"])
        dist.barrier()

    error = report(KeyNotSet, 4, wait)
    assert error.ranks == (2,)
    assert str(error).startswith("no rank will set the keys of store.wait(['default_pg/never'])\n")


def test_waiting_for_a_key_again_and_again_is_a_deadlock() -> None:
    error = report(Deadlock, 3, lambda: None if rank_in(1) else wait_for_every_rank("all"))
    assert error.ranks == (0, 2)


def test_polling_for_ever_is_a_deadlock() -> None:
    def poll() -> None:
        if rank_in(0):
            work = dist.irecv(torch.zeros(1), 1)
            while not work.is_completed():
                pass

    assert report(Deadlock, 2, poll).ranks == (1, 0)


def test_ranks_that_poll_for_each_other_are_a_deadlock() -> None:
    def poll() -> None:
        work = dist.irecv(torch.zeros(1), int(rank_in(0)))
        while not work.is_completed():
            time.sleep(0)

    error = report(Deadlock, 2, poll)
    assert error.ranks == (0, 1) and "can go on\n" not in str(error).partition("\n\n")[2]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda odd: dist.all_reduce(torch.zeros(7 if odd else 8)), "different shapes"),
        (lambda odd: dist.all_reduce(torch.zeros(8, dtype=torch.float64 if odd else None)), "different dtypes"),
        (
            lambda odd: dist.all_reduce(torch.zeros(8), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
            "different reductions or roots",
        ),
        (lambda odd: dist.broadcast(torch.zeros(8), src=int(odd)), "different reductions or roots"),
        (
            lambda odd: dist.barrier() if odd else dist.all_reduce(torch.zeros(8)),
            "different operations",
        ),
        (
            lambda odd: dist.all_to_all_single(
                torch.zeros(4), torch.zeros(4), [1, 1, 1, 1], [1, 1, 2, 0] if odd else [1, 1, 1, 1]
            ),
            "different splits",
        ),
        (lambda odd: dist.all_to_all([torch.zeros(2)] * 4, [torch.zeros(2 + odd)] * 4), "different splits"),
        *(
            (call, "the tensors of one call do not fit together")
            for call in (
                lambda odd: dist.all_gather_into_tensor(torch.zeros(9 if odd else 8), torch.zeros(2)),
                lambda odd: dist.all_gather_into_tensor(
                    torch.zeros(8), torch.zeros(2, dtype=torch.bfloat16 if odd else None)
                ),
                lambda odd: dist.reduce_scatter(torch.zeros(3 if odd else 2), [torch.zeros(2)] * 4),
                lambda odd: dist.gather(torch.zeros(2), [torch.zeros(2 + odd)] * 4 if rank_in(2) else None, dst=2),
                lambda odd: dist.all_to_all([torch.zeros(2)] * (3 if odd else 4), [torch.zeros(2)] * 4),
            )
        ),
    ],
)
def test_a_mismatch_is_an_error_at_the_call_with_both_sides(call: Callable[[bool], Any], reason: str) -> None:
    error = report(CollectiveMismatch, 4, lambda: call(rank_in(2)))
    assert str(error).startswith(reason)
    assert "rank 2: " in str(error)
    assert 2 in error.ranks
    assert f"at {os.path.relpath(__file__)}:" in str(error)


def test_new_groups_in_another_order_are_reported() -> None:
    def create() -> None:
        for ranks in ([2, 3], [0, 1]) if rank_in(2) else ([0, 1], [2, 3]):
            dist.new_group(ranks)

    error = report(CollectiveMismatch, 4, create)
    assert "different ranks" in str(error)
    assert "rank 2: new_group([0, 1])" in str(error)  # in call 2: disjoint groups may share call 1


def test_a_new_group_that_one_rank_does_not_call_is_reported() -> None:
    error = report(UnfinishedCalls, 4, lambda: None if rank_in(3) else dist.new_group([0, 1]))
    assert error.ranks == (3, 0)
    assert str(error).startswith("rank 3 called new_group 1 times, and rank 0 2 times")


def test_a_group_that_the_missing_rank_has_not_created_is_named_in_a_deadlock() -> None:
    error = report(Deadlock, 2, lambda: None if rank_in(1) else dist.barrier(dist.new_group([0, 1])))
    assert "and has not created this group (rank 0 did at" in str(error)


def test_a_collective_of_a_non_member_is_reported() -> None:
    def compute() -> None:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.zeros(1), group=group)

    error = report(NonMemberError, 3, compute)
    assert error.ranks == (2,)
    assert "rank 2 calls all_reduce on a group that it is not a member of" in str(error)


def test_the_group_object_of_another_rank_is_rejected() -> None:
    groups: dict[int, Any] = {}

    def compute() -> None:
        groups[dist.get_rank()] = dist.group.WORLD
        dist.all_reduce(torch.zeros(1))
        dist.all_reduce(torch.zeros(1), group=groups[0])

    assert "with a group object of rank 0" in str(report(NonMemberError, 2, compute))


def test_a_call_that_others_did_not_make_is_reported_at_the_end() -> None:
    def compute() -> None:
        if not rank_in(1):
            dist.all_reduce(torch.zeros(1), async_op=True)

    error = report(UnfinishedCalls, 3, compute)
    assert error.ranks == (1, 0)
    assert str(error).startswith("all ranks have ended, and rank 1 did not make a call that others made")


@pytest.mark.parametrize("seed", range(3))
def test_a_tensor_that_changes_before_the_wait_is_reported_in_every_order(seed: int) -> None:
    def compute() -> None:
        gradient = torch.ones(3)
        work = dist.all_reduce(gradient, async_op=True)
        gradient.div_(2)
        work.wait()

    assert "all_reduce(float32[3], op=SUM)" in str(report(AsyncAccessError, 3, compute, seed=seed))
    run_ranks(3, compute, check_async=False)


def start_in_order(members: list[list[int]], order: dict[int, list[int]]) -> None:
    """Create groups, start a collective of each in the order of this rank, and wait for all of them."""
    groups = [dist.new_group(ranks, group_desc=str(index)) for index, ranks in enumerate(members)]
    tensors = [torch.ones(2) for _ in groups]
    mine = order[dist.get_rank()]
    works = [dist.all_reduce(tensors[index], group=groups[index], async_op=True) for index in mine]
    for work in works:
        work.wait()
    assert all(tensors[index].tolist() == [2, 2] for index in mine)


RING = [[0, 1], [1, 2], [0, 2]]


@pytest.mark.parametrize("seed", range(3))
def test_groups_that_ranks_use_in_orders_that_contradict_each_other_are_reported(seed: int) -> None:
    pair = [[0, 1], [0, 1]]
    error = report(GroupOrderError, 2, lambda: start_in_order(pair, {0: [0, 1], 1: [1, 0]}), seed=seed)
    assert (sorted(error.ranks), sorted(error.groups)) == ([0, 1], ["0", "1"])
    error = report(GroupOrderError, 3, lambda: start_in_order(RING, {0: [2, 0], 1: [0, 1], 2: [1, 2]}), seed=seed)
    assert (sorted(error.ranks), sorted(error.groups)) == ([0, 1, 2], ["0", "1", "2"])
    run_ranks(3, start_in_order, RING, {0: [2, 0], 1: [0, 1], 2: [2, 1]}, seed=seed)


def test_values_that_must_agree_and_do_not_are_reported() -> None:
    def parameters() -> None:
        require_equal({"bias": torch.zeros(2), "weight": torch.full((2,), float(rank_in(2)))}, what="parameters")

    error = report(Disagreement, 3, parameters)
    assert str(error).startswith("parameters 'weight' differ; equal on ranks [0, 1] only")
    assert error.ranks == (0, 2)

    def random_states() -> None:
        require_different(torch.tensor([0.0, 1.0, 0.0])[dist.get_rank()], what="seeds")

    assert str(report(Disagreement, 3, random_states)).startswith("seeds are equal, and must differ")

    def gradients(reduced: bool) -> None:
        layer = torch.nn.Linear(2, 2)
        layer(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
        if reduced:
            dist.all_reduce(layer.weight.grad)
        require_equal({name: parameter.grad for name, parameter in layer.named_parameters()}, what="gradients")

    assert str(report(Disagreement, 3, lambda: gradients(False))).startswith("gradients 'weight' differ")
    run_ranks(3, lambda: gradients(True))
    run_ranks(3, lambda: require_equal(torch.ones(2) * torch.nan))
    run_ranks(3, lambda: require_different(torch.tensor(dist.get_rank())))


def test_an_error_ends_the_ranks_even_if_the_program_catches_it() -> None:
    def compute() -> None:
        try:
            dist.all_reduce(torch.zeros(2 + dist.get_rank()))
        except SimulationError:
            dist.barrier()

    report(CollectiveMismatch, 2, compute)


@pytest.mark.parametrize("what", ["all_reduce", "wait of all_reduce"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_communicates_or_waits_for_its_rank_is_rejected(what: str) -> None:
    def compute() -> None:
        group, tensor = dist.group.WORLD, torch.zeros(1)
        wait = dist.all_reduce(tensor, async_op=True).wait if what.startswith("wait") else None
        thread = threading.Thread(target=wait or (lambda: dist.all_reduce(tensor, group=group)), name="prefetch")
        thread.start()
        thread.join()

    assert f"{what} in the thread 'prefetch'" in str(report(UnsupportedError, 2, compute))


def test_fork_is_rejected() -> None:
    def start_process() -> None:
        multiprocessing.get_context("fork").Process(target=print).start()

    for forks in (lambda: os.fork(), lambda: os.forkpty(), start_process):
        assert "rank 0 forks this process" in str(report(UnsupportedError, 2, forks))


def test_one_rank_may_use_the_profiler_of_torch_and_two_at_once_are_rejected() -> None:
    def compute(profiled: int) -> None:
        with torch.profiler.profile() if dist.get_rank() < profiled else contextlib.nullcontext():
            dist.barrier()

    run_ranks(2, compute, 1)
    assert report(UnsupportedError, 2, lambda: compute(2)).ranks == (1,)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint32])
def test_a_type_that_backends_do_not_have_is_rejected_in_collectives(dtype: torch.dtype) -> None:
    assert report(UnsupportedError, 2, lambda: dist.all_reduce(torch.ones(2, dtype=dtype))).ranks == (0,)


def test_a_collective_that_changes_what_the_backward_pass_needs_is_an_error_of_autograd() -> None:
    def compute() -> None:
        weight, factor = torch.ones(2, requires_grad=True), torch.full((2,), 2.0)
        product = (weight * factor).sum()
        dist.all_reduce(factor)
        product.backward()

    with pytest.raises(RuntimeError):
        run_ranks(2, compute)


def test_a_new_group_without_ranks_is_rejected() -> None:
    assert report(UnsupportedError, 2, lambda: dist.new_group([])).ranks == (0,)


def test_streams_of_cuda_are_rejected_but_those_of_megatron() -> None:
    def overlap() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            dist.all_reduce(torch.zeros(1))

    error = report(UnsupportedError, 2, overlap)
    assert str(error).startswith("rank 0 creates a torch.cuda.Stream; ")
    assert " in overlap" in str(error)

    def of_megatron() -> None:
        from megatron.core.pipeline_parallel import utils

        utils.set_streams()
        dist.barrier()

    run_ranks(2, of_megatron)


def test_tensors_of_other_devices_are_rejected() -> None:
    error = report(UnsupportedError, 2, lambda: dist.all_reduce(torch.zeros(1, device="meta")))
    assert "all_reduce of a tensor on meta" in str(error)


def test_a_layout_that_megatron_cannot_have_is_rejected() -> None:
    custom = ParallelLayout(4, extra={"custom": 2}, order="tp-cp-ep-dp-pp-custom")
    for layout in (custom, 0):
        with pytest.raises(LayoutError):
            run_ranks(layout, lambda: None)


def test_keyboard_interrupt_ends_all_ranks() -> None:
    def compute() -> None:
        if rank_in(1):
            signal.raise_signal(signal.SIGINT)
        dist.barrier()
        while True:
            dist.barrier()

    with pytest.raises(KeyboardInterrupt):
        run_ranks(3, compute)


@pytest.mark.parametrize("moment", ["threads start", "rank computes"])
def test_keyboard_interrupt_in_the_calling_thread_ends_all_ranks(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = threading.Event()

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        interrupted.set()

    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "rank 1":
            interrupt()

    def compute() -> None:
        if moment == "rank computes" and rank_in(1):
            interrupt()
        while True:
            dist.barrier()

    if moment == "threads start":
        monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(3, compute)
    assert interrupted.is_set()


def test_keyboard_interrupt_ends_a_rank_that_makes_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_STOP_SECONDS", 0.1)

    def compute() -> None:
        if rank_in(1):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            while True:
                pass
        dist.barrier()

    with pytest.raises(KeyboardInterrupt):
        run_ranks(3, compute)


def test_a_thread_that_the_system_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_two(thread: threading.Thread) -> None:
        if thread.name == "rank 2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError) as caught:
        run_ranks(4, dist.barrier)
    assert caught.value.args == ("can't start new thread",)


def test_a_race_is_a_seed_that_fails_every_time() -> None:
    def outcome(seed: int) -> list[int]:
        finished: list[int] = []

        def compute(shared: Any) -> None:
            dist.barrier()
            finished.append(dist.get_rank())

        run_ranks(4, compute, None, seed=seed)
        return finished

    assert outcome(1) == outcome(1)
    assert len({tuple(outcome(seed)) for seed in (1, 2, 3)}) > 1
