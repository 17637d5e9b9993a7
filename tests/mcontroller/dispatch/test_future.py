"""Results that were not waited for: what they give, and which parts of them travel where."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mcontroller import (
    ClassWithInitArgs,
    DataProto,
    DataProtoFuture,
    Dispatch,
    DispatchError,
    Future,
    GroupBroken,
    Worker,
    WorkerError,
    WorkerGroup,
    register,
)
from mcontroller.local import LocalExecutor
from parallel_state.topology import Topology
from tests.mcontroller.batches import numbered, numbers
from tests.mcontroller.groups import topology_of


class Counting(LocalExecutor):
    """Keeps the rows that each fetch brings."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fetched: list[list[Any]] = []

    def fetch(self, handles: Sequence[Any], timeout: float | None = None) -> list[Any]:
        values = super().fetch(handles, timeout)
        self.fetched.append([numbers(value) for value in values if isinstance(value, DataProto)])
        return values


class Scored(DataProto):
    """A user's batch, with a method and an attribute."""

    source = ""

    def total(self) -> int:
        return sum(numbers(self))


class Model(Worker):
    @register(Dispatch.MEGATRON_COMPUTE_PROTO, blocking=False)
    def score(self, batch: DataProto) -> DataProto:
        scored = Scored(batch.batch, batch.non_tensor_batch)
        scored.source = "the worker"
        return scored

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, blocking=False)
    def compute(self, batch: DataProto, other: DataProto | None = None) -> DataProto:
        self.received, self.beside = batch, other
        return batch

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, blocking=False, changes_rows=True)
    def expand(self, batch: DataProto) -> DataProto:
        return batch.repeat(2, interleave=True)

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, blocking=False)
    def metrics(self, batch: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"rows": len(batch)}})

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, blocking=False)
    def size(self, batch: DataProto) -> int:
        return len(batch)

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, materialize_futures=False)
    def later(self, batch: Any) -> DataProto:
        assert isinstance(batch, DataProtoFuture) and batch.local_tensors() == {}
        return batch.get()

    @register(Dispatch.RANK_ZERO)
    def whole(self, batch: DataProto) -> list[int]:
        return numbers(batch)

    @register(Dispatch.MEGATRON_COMPUTE)
    def entry(self, batch: DataProto) -> list[int]:
        return numbers(batch)

    @register(Dispatch.MEGATRON_COMPUTE)
    def pass_on(self, value: int) -> int:
        return value

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def number(self, value: int) -> int:
        return value + self.rank

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, blocking=False)
    def fail(self, batch: DataProto) -> DataProto:
        raise RuntimeError("out of memory")


def group_of(topology: Topology, name: str = "actor") -> Any:
    executor = Counting(ClassWithInitArgs(Model), topology.world_size, name)
    return WorkerGroup(Model, executor, name, topology=topology)


TP2_DP2 = topology_of(4, tp=2)
DP4 = topology_of(4)
DP3 = topology_of(3)


def test_a_call_that_is_not_waited_for_returns_a_future_of_its_result() -> None:
    batch: Any = numbered(5)
    batch.source = "an attribute of the program's own"
    future = group_of(TP2_DP2).compute(batch)
    assert isinstance(future, DataProtoFuture)
    assert future.done() and future.wait(0)
    assert repr(future) == "DataProto(computed on the workers)"
    assert numbers(future.get()) == [0, 1, 2, 3, 4] and future.source == batch.source


def test_a_result_that_is_a_list_is_a_plain_future() -> None:
    future = group_of(TP2_DP2).number(10)
    assert type(future) is Future and future.get() == [10, 11, 12, 13]
    assert repr(future) == "Future(done, .get() returns the result)"


def test_a_future_of_a_list_is_waited_for_when_it_is_passed_on() -> None:
    entries = group_of(topology_of(2)).number(10)
    assert group_of(topology_of(2), "critic").pass_on(entries) == [10, 11]


def test_metrics_of_a_call_that_is_not_waited_for_are_merged_when_it_is() -> None:
    assert group_of(TP2_DP2).metrics(numbered(5)).get().meta_info == {"metrics": {"rows": [2, 3]}}


def test_with_as_many_shards_each_consumer_fetches_its_own_shard_alone() -> None:
    producer, consumer = group_of(TP2_DP2), group_of(topology_of(2), "critic")
    future = producer.compute(numbered(5))
    result = consumer.compute(future)
    assert consumer.executor.fetched == [[[0, 1]], [[2, 3, 4]]]
    assert producer.executor.fetched == [[]]  # the outlines
    assert numbers(result.get()) == [0, 1, 2, 3, 4]


def test_with_other_shards_a_consumer_fetches_the_parts_that_overlap_its_rows() -> None:
    producer, consumer = group_of(DP4), group_of(DP3, "critic")
    consumer.compute(producer.compute(numbered(8)))  # parts of 2 rows; shards of 2, 3 and 3 rows
    assert consumer.executor.fetched == [[[0, 1]], [[2, 3], [4, 5]], [[4, 5], [6, 7]]]
    assert [numbers(worker.received) for worker in consumer.executor.workers] == [[0, 1], [2, 3, 4], [5, 6, 7]]


def test_rows_multiplied_on_the_way_are_split_by_their_new_number() -> None:
    expanded = group_of(TP2_DP2).expand(numbered(3))
    result = group_of(DP3, "critic").compute(expanded).get()
    assert result.batch["n"].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("topology", [TP2_DP2, DP3, DP4])
def test_padding_of_the_first_call_is_undone_at_the_end_of_a_chain(topology: Topology) -> None:
    future = group_of(DP4).compute.options(padding="repeat")(numbered(2))
    consumer = group_of(topology, "critic")
    assert numbers(consumer.compute(consumer.compute(future)).get()) == [0, 1]
    assert all(len(worker.received) for worker in consumer.executor.workers)


def test_padding_rows_of_a_future_have_no_loss_mask_where_that_is_asked_for() -> None:
    batch = numbered(4)
    batch.batch["loss_mask"] = torch.ones(4, dtype=torch.int64)
    consumer = group_of(DP3, "critic")
    result = consumer.compute.options(padding="zero_loss")(group_of(TP2_DP2).compute(batch))
    assert [worker.received.batch["loss_mask"].tolist() for worker in consumer.executor.workers] == [
        [1, 0],
        [1, 0],
        [1, 1],
    ]
    assert result.get() == batch


def test_a_balanced_order_is_undone_at_the_end_of_a_chain() -> None:
    future = group_of(TP2_DP2).compute.options(balance="n")(numbered(6))
    aligned, other = group_of(TP2_DP2, "critic"), group_of(DP3, "reward")
    assert numbers(aligned.compute(future).get()) == [0, 1, 2, 3, 4, 5]
    assert numbers(other.compute(future).get()) == [0, 1, 2, 3, 4, 5]
    assert [numbers(worker.received) for worker in other.executor.workers] == [[0, 1], [2, 3], [4, 5]]


def test_a_batch_next_to_a_future_must_have_its_rows() -> None:
    future = group_of(TP2_DP2).compute(numbered(4))
    assert numbers(group_of(TP2_DP2, "critic").compute(future, numbered(4)).get()) == [0, 1, 2, 3]
    for topology in (TP2_DP2, DP3):
        with pytest.raises(DispatchError) as raised:
            group_of(topology, "critic").compute(future, numbered(5))
        assert raised.value.lengths == {0: 4, 1: 5}


def test_futures_of_one_call_must_have_the_same_rows() -> None:
    producer = group_of(TP2_DP2)
    short, long = producer.compute(numbered(4)), producer.expand(numbered(4))
    for topology in (TP2_DP2, DP3):
        with pytest.raises(DispatchError) as raised:
            group_of(topology, "critic").compute(short, long)
        assert raised.value.lengths[0] == 4 < raised.value.lengths[1]


def test_futures_that_were_split_differently_meet_row_by_row() -> None:
    producer, consumer = group_of(TP2_DP2), group_of(TP2_DP2, "critic")
    balanced = producer.compute.options(balance="n")(numbered(6))
    result = consumer.compute(balanced, producer.compute(numbered(6)))
    assert [numbers(worker.received) for worker in consumer.executor.workers] == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2
    assert all(worker.received == worker.beside for worker in consumer.executor.workers)
    assert numbers(result.get()) == [0, 1, 2, 3, 4, 5]


def test_a_method_may_ask_for_the_future_itself() -> None:
    future = group_of(TP2_DP2).compute(numbered(5))
    assert numbers(group_of(TP2_DP2, "critic").later(future)) == [0, 1, 2, 3, 4]


def test_modes_that_do_not_split_rows_take_batches_whole_or_chunk_by_chunk() -> None:
    future, consumer = group_of(TP2_DP2).compute(numbered(5)), group_of(TP2_DP2, "critic")
    assert consumer.whole(future) == [0, 1, 2, 3, 4]
    assert consumer.entry(future.chunk(2)) == [[0, 1], [2, 3, 4]]
    with pytest.raises(DispatchError) as raised:
        consumer.entry(future)
    assert (raised.value.method, raised.value.argument) == ("entry", 0)


@pytest.mark.parametrize(("topology", "times"), [(TP2_DP2, 2), (topology_of(1), 1)])
def test_metrics_are_passed_on_to_every_shard(topology: Topology, times: int) -> None:
    future = group_of(TP2_DP2).metrics(numbered(5))
    assert group_of(topology, "critic").compute(future).get().meta_info == {"metrics": {"rows": [2, 3] * times}}


def test_what_is_no_batch_cannot_be_passed_on_row_by_row() -> None:
    future = group_of(TP2_DP2).size(numbered(5))
    for read in (future.get, lambda: group_of(DP3, "critic").compute(future)):
        with pytest.raises(DispatchError) as raised:
            read()
        assert (raised.value.method, raised.value.rank, raised.value.type) == ("size", 0, "int")


def test_explain_does_not_know_the_size_of_columns_on_workers() -> None:
    future, consumer = group_of(TP2_DP2).compute(numbered(4)), group_of(TP2_DP2, "critic")
    alone = str(consumer.compute.explain(future))
    assert "columns on workers read by all ranks" in alone
    both = consumer.compute.explain(future, numbered(4))
    assert both.ranks[0].unknown_bytes and both.ranks[0].bytes > 0
    assert " + columns on workers" in str(both)


def test_futures_of_another_transport_are_fetched_first() -> None:
    producer, consumer = group_of(TP2_DP2), group_of(TP2_DP2, "critic")
    producer.executor.transport = "elsewhere"
    result = consumer.compute(producer.compute(numbered(5)))
    assert consumer.executor.fetched == [] and numbers(result.get()) == [0, 1, 2, 3, 4]


def test_a_failure_is_raised_by_get_and_by_whoever_passes_the_batch_on() -> None:
    group = group_of(TP2_DP2)
    future = group.fail(numbered(4))
    assert future.done()
    for read in (future.get, future.check, lambda: future.chunk(2), lambda: group_of(DP3, "critic").compute(future)):
        with pytest.raises(WorkerError) as failed:
            read()
        assert "out of memory" in failed.value.cause
    with pytest.raises(GroupBroken) as raised:
        group.compute(numbered(4))
    assert isinstance(raised.value.first_cause, WorkerError)


def test_a_future_inside_another_value_is_rejected() -> None:
    with pytest.raises(DispatchError):
        pickle.dumps({"number": group_of(TP2_DP2).number(4)})


@pytest.mark.parametrize("read", [lambda batch: None, len, lambda batch: batch.get()])
def test_a_batch_of_a_users_class_is_one_when_it_was_not_waited_for(read: Callable[[DataProto], Any]) -> None:
    group = group_of(DP4)
    later = group.score(numbered(8))
    read(later)
    assert (later.total(), later.source) == (sum(range(8)), "the worker")
    assert type(later) is type(later[:2]) is Scored
    with pytest.raises(AttributeError):
        _ = group.score(numbered(8)).no_such_name
