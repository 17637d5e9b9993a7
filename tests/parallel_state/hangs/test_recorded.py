"""Who waits for whom, from the records of real processes; and the record of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.distributed as dist

from parallel_state.hangs.record import (
    DONE,
    IN_CALL,
    RETURNED,
    RING,
    WAITING,
    LastCall,
    RankRecord,
    RecordedGroup,
    RecordMemory,
    Route,
    read_rank_record,
)
from parallel_state.hangs.recorder import record_calls
from parallel_state.hangs.report import RecordedRanks

COORDINATES = [{"tp": rank % 2, "dp": rank // 2, "etp": 0} for rank in range(4)]
TP = RecordedGroup("1", "TENSOR_MODEL_PARALLEL_GROUP", (0, 1), "gloo")
ALL = RecordedGroup("0", "undefined", (0, 1, 2, 3), "gloo")


def call(group: RecordedGroup, state: int, index: int = 0, kind: str = "collective", **options: object) -> LastCall:
    peer = options.pop("peer", -1)
    fields = {"operation": "all_reduce", "tensors": ("float32[2]",), "details": ("op=SUM",), "line": "a.py:1 in f"}
    return LastCall(0, Route(kind, group, peer), index, **{**fields, **options}, state=state)  # type: ignore[arg-type]


def report(calls: Mapping[int, list[LastCall]], **options: object) -> tuple[str, str]:
    records = {
        rank: RankRecord(rank, tuple(made), {entry.route: entry.index + 1 for entry in made})
        for rank, made in calls.items()
    }
    return RecordedRanks(records, COORDINATES, **options).report()  # type: ignore[arg-type]


def test_two_groups_in_another_order_are_a_cycle() -> None:
    cause, stories = report({0: [call(TP, WAITING)], 1: [call(ALL, WAITING)], 2: [call(ALL, WAITING)]}, ended={3})
    assert cause == "rank 3 (tp=1 dp=1) has ended, and rank 1 waits for it"
    cause, stories = report({0: [call(TP, WAITING)], 1: [call(ALL, WAITING)]})
    assert cause == "rank 2 (tp=0 dp=1) is in no collective, and rank 1 waits for it"
    pairs = RecordedGroup("2", "undefined", (0, 1), "gloo")
    cause, stories = report({0: [call(TP, WAITING)], 1: [call(pairs, WAITING)]})
    assert cause == "ranks wait for each other: 0 -> 1 -> 0"
    assert "on group '2' (tp) [0, 1]\n    at a.py:1 in f\n    waits for rank 0 (tp=0 dp=0), which waits in" in stories


def test_other_operations_or_shapes_at_one_number_are_the_cause() -> None:
    cause, _ = report({0: [call(TP, WAITING)], 1: [call(TP, WAITING, operation="broadcast", details=("root=0",))]})
    assert cause.startswith("different operations: rank 0 (tp=0 dp=0) made all_reduce(float32[2], op=SUM), call 0 on")
    cause, _ = report({0: [call(TP, WAITING)], 1: [call(TP, WAITING, tensors=("float32[3]",))]})
    assert cause.startswith("different shapes or dtypes: ") and "float32[3]" in cause


def test_on_nccl_a_rank_waits_in_the_first_collective_that_others_lack() -> None:
    device = RecordedGroup("1", "TENSOR_MODEL_PARALLEL_GROUP", (0, 1), "nccl")
    done = call(device, DONE, 0)
    cause, stories = report({0: [done, call(device, DONE, 1), call(device, RETURNED, 2)], 1: [done]}, ended={1})
    assert cause == "rank 1 (tp=1 dp=0) has ended, and rank 0 waits for it"
    assert "all_reduce(float32[2], op=SUM), call 1 on group" in stories
    assert "its last on this group: all_reduce, call 0, at a.py:1 in f" in stories
    assert report({0: [done], 1: [done]}) == ("", "")


def test_a_receive_waits_for_a_rank_that_has_sent_less() -> None:
    sent = call(TP, DONE, 0, "send", operation="send", peer=1)
    first = call(TP, DONE, 0, "recv", operation="recv", peer=0, details=())
    second = call(TP, WAITING, 1, "recv", operation="recv", peer=0, details=())
    cause, stories = report({0: [sent], 1: [first, second]}, activities={0: "is in no collective, at b.py:2 in g"})
    assert cause == "rank 0 (tp=0 dp=0) is in no collective, at b.py:2 in g, and rank 1 waits for it"
    assert "rank 1 (tp=1 dp=0): recv(float32[2]) from rank 0 on group" in stories


def test_a_stopped_member_is_missing_although_it_has_made_the_call() -> None:
    calls = {0: [call(TP, WAITING)], 1: [call(TP, IN_CALL)]}
    cause, _ = report(calls, stopped={1}, activities={1: "is stopped by a signal"})
    assert cause == "rank 1 (tp=1 dp=0) is stopped by a signal, and rank 0 waits for it"


@pytest.fixture
def memory() -> Iterator[RecordMemory]:
    """The record of this process, which is the only rank of a gloo group."""
    memory = RecordMemory()
    stop = record_calls(memory)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield memory
    dist.destroy_process_group()
    stop()


def recorded(memory: RecordMemory) -> RankRecord:
    record = read_rank_record(os.getpid(), memory.descriptor)
    assert record is not None
    return record


def test_a_record_has_calls_with_tensors_reduction_root_state_and_line(memory: RecordMemory) -> None:
    dist.all_reduce(torch.ones(2, 3), op=dist.ReduceOp.MAX)
    work = dist.broadcast(torch.ones(4, dtype=torch.int64), 0, async_op=True)
    assert [entry.state for entry in recorded(memory).calls] == [DONE, RETURNED]
    work.wait()
    dist.all_gather([torch.ones(1)], torch.ones(1))
    record = recorded(memory)
    texts = [entry.text().partition(" on ")[0] for entry in record.calls]
    expected = ["all_reduce(float32[2, 3], op=MAX), call 0", "broadcast(int64[4], root=0), call 1"]
    assert texts == [*expected, "all_gather(float32[1]), call 2"]
    assert {entry.state for entry in record.calls} == {DONE} and record.rank == 0
    assert all(
        "test_recorded.py" in entry.line and entry.line.endswith("root_state_and_line") for entry in record.calls
    )


def test_the_last_calls_are_kept_and_all_are_counted(memory: RecordMemory) -> None:
    for _ in range(RING + 3):
        dist.barrier()
    record = recorded(memory)
    assert [entry.index for entry in record.calls] == list(range(3, RING + 3))
    assert list(record.counts.values()) == [RING + 3]


def test_a_group_that_a_record_has_no_room_for_leaves_the_others_readable() -> None:
    memory, groups = RecordMemory(), [RecordedGroup(str(index), "", tuple(range(100_000))) for index in range(9)]
    channels = [memory.channel("collective", group, -1, 0) for group in groups]
    assert channels[0] is not None and channels[-1] is None
    assert groups[0] in [route.group for route in recorded(memory).counts]


def test_nothing_is_recorded_after_the_end(memory: RecordMemory) -> None:
    stop = record_calls(other := RecordMemory())
    stop()
    dist.barrier()
    assert recorded(other).calls == () and len(recorded(memory).calls) == 1
