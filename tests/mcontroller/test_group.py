"""Calls of a group: arguments of each rank, results, and errors before anything is sent."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from mcontroller import (
    ClassWithInitArgs,
    DataProto,
    Dispatch,
    DispatchError,
    DistGlobalInfo,
    DistRankInfo,
    Execute,
    MControllerError,
    TopologyError,
    Worker,
    WorkerGroup,
    register,
)
from mcontroller.local import LocalCall, LocalExecutor
from mcontroller.transport import Arguments
from parallel_state.topology import Topology
from tests.mcontroller.batches import numbered, numbers
from tests.mcontroller.groups import group_on, method, topology_of


class Model(Worker):
    def __init__(self) -> None:
        self.received: list[Any] = []

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute(self, batch: DataProto, scale: float = 1.0, other: DataProto | None = None) -> DataProto:
        self.received.append((batch, scale, other))
        return batch

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def update(self, batch: DataProto) -> DataProto:
        metrics = {"loss": float(self.rank), **({"extra": 1} if self.rank == 4 else {})}
        return DataProto(meta_info={"metrics": metrics})

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, changes_rows=True)
    def keep_even(self, batch: DataProto) -> DataProto:
        return batch[batch.batch["n"] % 2 == 0]  # type: ignore[index]

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def nothing(self, batch: DataProto | None = None) -> DataProto:
        return DataProto()

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def spoil(self, batch: DataProto) -> DataProto:
        batch.batch["n"] += 100  # type: ignore[index]
        batch.meta_info["stops"].append(self.rank)
        return batch.select(meta_info_keys=[])

    @register(Dispatch.DP_COMPUTE_METRIC)
    def rows_of_rank(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def where(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self.rank, args, kwargs

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def on_rank_zero(self, value: Any) -> Any:
        return value

    @register()
    def arguments(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self.rank, args, kwargs

    @register(Dispatch.MEGATRON_PP_ONLY)
    def stage(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Any, batch: DataProto) -> DataProto:
        return function(batch)

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def generate(self) -> None: ...

    @register(Dispatch.ONE_TO_ALL)
    async def later(self, value: int) -> int:
        return value + self.rank

    @register(Dispatch.ONE_TO_ALL)
    async def through_another_group(self, value: int) -> list[int]:
        return list(group_of().later(value))

    def unregistered(self, value: int) -> int:
        return value * self.rank


class Recording(LocalExecutor):
    """Records what was submitted."""

    def submit(
        self, method: str, arguments: Mapping[int, Arguments], returning: Sequence[int], **options: Any
    ) -> LocalCall:
        self.last_arguments, self.last_returning, self.last_options = arguments, returning, options
        return super().submit(method, arguments, returning, **options)


def group_of(worker_cls: type = Model, topology: Topology | None = None, **options: Any) -> Any:
    topology = topology or topology_of(8, tp=2, pp=2)
    executor = Recording(ClassWithInitArgs(worker_cls), topology.world_size, "actor")
    return WorkerGroup(worker_cls, executor, "actor", topology=topology, **options)


def test_only_ranks_that_are_collected_ship_their_results() -> None:
    group = group_of()
    group.compute(numbered(4))
    assert group.executor.last_returning == (4, 6)
    assert len(group.executor.last_arguments) == 8


def test_replicas_of_a_shard_get_the_same_arguments_object() -> None:
    group = group_of()
    group.compute(numbered(4))
    assert len(set(map(id, group.executor.last_arguments.values()))) == 2
    group.where(torch.ones(3))
    assert len(set(map(id, group.executor.last_arguments.values()))) == 1
    group.arguments([numbered(1)] * 8)
    assert len(set(map(id, group.executor.last_arguments.values()))) == 1


def test_values_stay_on_the_ranks_only_if_a_result_may_be_passed_on() -> None:
    group = group_of()
    for call, kept in ((group.compute, False), (group.compute.options(blocking=False), True)):
        call(numbered(4))
        assert group.executor.last_options["keep"] is kept
    group.rows_of_rank.options(blocking=False)(numbered(4))
    assert group.executor.last_options["keep"] is False


def test_plain_values_next_to_batches_are_shared_once_for_all_their_readers() -> None:
    group, shared = group_of(), []
    group.executor.share = lambda value, readers: shared.append((value, readers)) or value
    group.compute(numbered(4), scale=0.5)
    assert shared == [(0.5, 8)]


@pytest.mark.parametrize("rows", [1, 2, 5, 7])
def test_padding_with_keyword_arguments_loses_no_rows(rows: int) -> None:
    batch = numbered(rows)
    assert numbers(group_of().compute.options(padding="repeat")(batch=batch, other=numbered(rows))) == list(range(rows))


@pytest.mark.parametrize("rows", [1, 5])
def test_padding_is_undone_for_non_blocking_calls(rows: int) -> None:
    future = group_of().compute.options(padding="repeat", blocking=False)(numbered(rows))
    assert numbers(future.get()) == list(range(rows))


def test_padding_is_undone_in_list_results_and_no_rank_is_dropped() -> None:
    result = group_of().rows_of_rank.options(padding="repeat")(numbered(3))
    assert [numbers(part) for part in result] == [[], [], [0], [], [], [1], [], [2]]


def test_padding_does_not_change_the_callers_batch() -> None:
    batch = numbered(3, stops=["a"])
    batch.batch["response_mask"] = torch.ones(3, 2)
    group_of().compute.options(padding="zero_loss")(batch)
    assert len(batch) == 3 and batch.meta_info == {"stops": ["a"]}
    assert batch.batch["response_mask"].tolist() == [[1, 1]] * 3


def test_zero_loss_padding_rows_have_no_loss_mask() -> None:
    group, batch = group_of(), numbered(3)
    batch.batch["response_mask"] = torch.ones(3, 2)
    group.compute.options(padding="zero_loss")(batch)
    masks = [worker.received[0][0].batch["response_mask"].sum(1).tolist() for worker in group.executor.workers]
    assert masks == [[2, 0]] * 2 + [[2, 2]] * 2 + [[2, 0]] * 2 + [[2, 2]] * 2
    with pytest.raises(DispatchError) as raised:
        group.compute.options(padding="zero_loss")(numbered(3))
    assert "response_mask" not in raised.value.columns


def test_no_rank_is_left_without_a_row_when_there_are_fewer_rows_than_shards() -> None:
    group = group_of()
    assert numbers(group.compute(numbered(1))) == [0]
    assert [numbers(worker.received[0][0]) for worker in group.executor.workers] == [[0]] * 8


def test_shards_do_not_share_meta_info_or_memory_with_the_batch() -> None:
    batch = numbered(4, stops=["a"])
    result = group_of().spoil(batch)
    assert batch.meta_info == {"stops": ["a"]} and numbers(batch) == [0, 1, 2, 3]
    assert result.batch["n"].tolist() == [100, 101, 102, 103]


def test_metrics_of_all_data_parallel_ranks_are_kept_though_their_keys_differ() -> None:
    result = group_of().update(numbered(4))
    assert result.meta_info == {"metrics": {"loss": [4.0, 6.0], "extra": [1]}}
    assert group_of().update(numbered(1)).meta_info["metrics"]["loss"] == [4.0, 6.0]


def test_a_batch_of_meta_info_alone_goes_to_every_shard_and_comes_back() -> None:
    settings = DataProto(meta_info={"temperature": 0.5})
    group = group_of()
    assert group.compute(settings) == settings
    assert all(worker.received[0][0] == settings for worker in group.executor.workers)


def test_a_batch_that_asks_for_padding_has_equal_shards() -> None:
    batch = DataProto.from_dict({"n": torch.arange(5)}, auto_padding=True)
    group = group_of()
    assert group.compute(batch).batch["n"].tolist() == [0, 1, 2, 3, 4]
    assert [len(worker.received[0][0]) for worker in group.executor.workers] == [3] * 8


def test_rows_may_be_dropped_by_a_method_when_nothing_has_to_be_undone() -> None:
    assert numbers(group_of().keep_even(numbered(7))) == [0, 2, 4, 6]


def test_rows_that_cannot_be_distinguished_from_padding_are_an_error() -> None:
    with pytest.raises(DispatchError) as raised:
        group_of().keep_even.options(padding="repeat")(numbered(3))
    assert (raised.value.role, raised.value.method, raised.value.shard) == ("actor", "keep_even", 0)


def test_batches_of_different_lengths_are_rejected_with_their_lengths() -> None:
    group = group_of()
    with pytest.raises(DispatchError) as raised:
        group.compute(numbered(4), other=numbered(3))
    assert raised.value.lengths == {0: 4, "other": 3}
    assert not hasattr(group.executor, "last_arguments")


def test_one_to_all_with_execute_rank_zero_returns_the_value_itself() -> None:
    group = group_of()
    assert group.on_rank_zero([1, 2]) == [1, 2]
    assert list(group.executor.last_arguments) == [0]


def test_a_tuple_is_one_value_of_a_rank_and_entries_of_shards() -> None:
    with pytest.raises(DispatchError) as raised:
        group_of().arguments(tuple("abcdefgh"))
    assert (raised.value.argument, raised.value.expected) == (0, 8)
    group = group_on(topology_of(4, tp=2))
    assert method(group, "rank_and_arguments", Dispatch.MEGATRON_COMPUTE)(("a", "b"))[1] == (2, ("b",), {})


@pytest.mark.parametrize("value", ["path", [1, 2], numbered(8)])
def test_anything_but_a_list_of_one_entry_per_rank_is_rejected(value: Any) -> None:
    with pytest.raises(DispatchError) as raised:
        group_of().arguments(value)
    assert raised.value.argument == 0 and raised.value.expected == 8


def test_modes_work_with_keyword_arguments_only_and_with_none() -> None:
    group = group_of()
    assert group.arguments(key=list(range(8)))[3] == (3, (), {"key": 3})
    assert group.arguments()[3] == (3, (), {})
    assert numbers(group.compute(batch=numbered(3))) == [0, 1, 2]
    assert group.nothing() == DataProto()
    assert group.where()[7] == (7, (), {})


def test_pp_only_lists_one_value_of_each_stage() -> None:
    assert group_of().stage("x") == [(0, "x"), (4, "x")]


def test_a_leading_function_goes_to_every_rank() -> None:
    assert numbers(group_of().apply(lambda batch: batch[:1], numbered(8))) == list(range(8))
    with pytest.raises(DispatchError) as raised:
        group_of().apply(numbered(8))
    assert (raised.value.method, raised.value.argument) == ("apply", 0)


def test_a_direct_rollout_method_is_never_dispatched() -> None:
    with pytest.raises(DispatchError) as raised:
        group_of().generate()
    assert (raised.value.method, raised.value.mode) == ("generate", "DIRECT_ROLLOUT_METHOD")


def test_async_methods_are_awaited_on_their_worker_also_for_a_caller_in_an_event_loop() -> None:
    async def in_a_loop() -> list[int]:
        return list(group_of().later(10))

    assert group_of().later(10) == asyncio.run(in_a_loop()) == [10, 11, 12, 13, 14, 15, 16, 17]
    assert group_of().through_another_group(0) == [[*range(8)]] * 8


def test_the_deadline_is_that_of_the_call_then_of_the_method_then_of_the_group() -> None:
    class Timed(Model):
        @register(Dispatch.ONE_TO_ALL, timeout=20)
        def where(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...

    group = group_of(Timed, timeout=60)
    for call, deadline in ((group.later, 60), (group.where, 20), (group.where.options(timeout=5), 5)):
        call(1)
        assert group.executor.last_options["timeout"] == deadline


def test_balance_splits_tokens_evenly_and_keeps_the_callers_order() -> None:
    group, batch = group_of(), numbered(8)
    batch.batch["attention_mask"] = torch.arange(16) < torch.tensor([16, 1, 1, 1, 1, 1, 1, 10])[:, None]
    assert numbers(group.compute.options(balance="attention_mask")(batch)) == list(range(8))
    tokens = {int(worker.received[0][0].batch["attention_mask"].sum()) for worker in group.executor.workers}
    assert tokens == {16}
    with pytest.raises(DispatchError) as raised:
        group.compute.options(balance="lengths")(batch)
    assert raised.value.column == "lengths"


def test_rows_of_one_label_stay_in_one_shard() -> None:
    group, batch = group_of(), numbered(6)
    batch.batch["prompt"] = torch.tensor([7, 8, 9, 7, 8, 7])
    assert numbers(group.compute.options(group_by="prompt")(batch)) == [0, 1, 2, 3, 4, 5]
    shards = {tuple(numbers(worker.received[0][0])) for worker in group.executor.workers}
    assert shards == {(0, 3, 5), (1, 2, 4)}
    batch.batch["prompt"] = torch.zeros(6, 2)
    with pytest.raises(DispatchError) as raised:
        group.compute.options(group_by="prompt")(batch)
    assert raised.value.column == "prompt"


def test_rows_of_each_label_are_balanced_by_themselves() -> None:
    group, batch = group_of(), numbered(8)
    batch.batch["tokens"] = torch.tensor([9, 8, 2, 1, 7, 7, 3, 3])
    batch.batch["step"] = torch.tensor([[0, 0], [0, 0], [0, 0], [0, 0], [0, 1], [0, 1], [0, 1], [0, 1]])
    assert numbers(group.compute.options(balance="tokens", within="step")(batch)) == list(range(8))
    shards = {tuple(numbers(worker.received[0][0])) for worker in group.executor.workers}
    assert shards == {(0, 3, 4, 7), (1, 2, 5, 6)}


def test_a_group_has_the_registered_methods_alone() -> None:
    group = group_of()
    for name in ("unregistered", "unheard"):
        assert not hasattr(group, name) and name not in dir(group)
    assert "compute" in dir(group)


def test_a_method_with_the_name_of_a_group_member_is_rejected() -> None:
    class Clash(Worker):
        @register(Dispatch.ONE_TO_ALL)
        def shutdown(self) -> None: ...

    with pytest.raises(DispatchError) as raised:
        group_of(Clash)
    assert raised.value.methods == ["shutdown"]


def test_execute_all_and_rank_zero_call_any_method() -> None:
    group = group_of()
    assert group.execute_all_sync("unregistered", 2) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert group.execute_all_sync("unregistered", list(range(8))) == [rank * rank for rank in range(8)]
    assert group.execute_all("unregistered", value=2).get() == group.execute_all_async("unregistered", 2).get()
    assert group.execute_rank_zero_sync("where", [1]) == (0, ([1],), {})
    assert group.execute_rank_zero("where").get() == group.execute_rank_zero_async("where").get() == (0, (), {})
    for name in ("unheard", "rank"):  # rank is a property
        with pytest.raises(DispatchError) as raised:
            group.execute_all(name)
        assert raised.value.method == name


class Reporting(Worker):
    """Reports the coordinates that its rank would have in a layout whose ranks count down."""

    sizes = DistGlobalInfo(tp_size=2, dp_size=2, pp_size=1)

    def __init__(self) -> None:
        self.queries = 0

    def get_megatron_rank_info(self) -> DistRankInfo:
        self.queries += 1
        return DistRankInfo(tp_rank=1 - self.rank % 2, dp_rank=1 - self.rank // 2, pp_rank=0)

    def get_megatron_global_info(self) -> DistGlobalInfo:
        return self.sizes

    @register(Dispatch.MEGATRON_COMPUTE)
    def entry(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register(Dispatch.ONE_TO_ALL)
    def anywhere(self) -> int:
        return self.queries


def test_the_topology_is_collected_once_and_only_when_a_mode_needs_it() -> None:
    group: Any = WorkerGroup(Reporting, LocalExecutor(ClassWithInitArgs(Reporting), 4, "actor"), "actor")
    assert group.anywhere() == [0] * 4
    assert group.entry(["a", "b"]) == [(3, "a"), (1, "b")]
    group.entry(["a", "b"])
    assert group.anywhere() == [1] * 4
    assert group.executor.coordinates[3]["dp"] == 0


def test_ranks_that_form_no_grid_are_an_error_before_the_first_call() -> None:
    class Twice(Reporting):
        def get_megatron_rank_info(self) -> DistRankInfo:
            return DistRankInfo(tp_rank=0, dp_rank=0, pp_rank=0)

    group: Any = WorkerGroup(Twice, LocalExecutor(ClassWithInitArgs(Twice), 4, "actor"), "actor")
    with pytest.raises(TopologyError):
        group.entry(["a", "b"])


def test_a_mode_with_axes_needs_workers_with_coordinates() -> None:
    group: Any = WorkerGroup(Model, LocalExecutor(ClassWithInitArgs(Model), 4, "actor"), "actor")
    assert len(group.where()) == 4
    with pytest.raises(TopologyError) as raised:
        group.compute(numbered(4))
    assert raised.value.mode == "MEGATRON_COMPUTE_PROTO"


def test_a_group_is_gone_when_its_last_reference_is() -> None:
    group = group_of()
    group.compute(numbered(4))
    watched = weakref.ref(group)
    del group
    assert watched() is None


def test_explain_shows_rows_and_returning_ranks_without_running_the_method() -> None:
    group = group_of()
    shown = group.compute.explain(numbered(3), scale=2.0)
    assert not hasattr(group.executor, "last_arguments")
    assert [list(rank.rows) for rank in shown.ranks] == [[0], [0], [1, 2], [1, 2]] * 2
    assert [rank.rank for rank in shown.ranks if rank.returns] == [4, 6]
    assert shown.ranks[2].coordinates["dp"] == 1 and shown.ranks[2].padding == 0
    assert shown.sent_bytes == sum(rank.bytes for rank in shown.ranks)
    assert "actor.compute (MEGATRON_COMPUTE_PROTO): 8 ranks, 2 shards, 2 return as concat" in str(shown)
    assert "tp=0 dp=1 pp=1        1      1-2 (2 rows)" in str(shown)


def test_explain_counts_what_is_stored_once_and_read_by_several_ranks() -> None:
    batch, weights = numbered(4), torch.zeros(1000)
    shown = group_of().compute.explain(batch, weights)
    assert (shown.stored_bytes, shown.sent_bytes) == (batch.nbytes() + 4000, 4 * batch.nbytes() + 8 * 4000)


def test_explain_shows_which_rows_are_padding() -> None:
    shown = group_of().compute.explain(numbered(1))
    assert [(list(rank.rows), rank.padding) for rank in shown.ranks[:4]] == [([0], 1), ([0], 1), ([0], 0), ([0], 0)]
    assert "0 (1 rows, 1 padding)" in str(shown)


def test_the_callers_errors_have_one_root() -> None:
    with pytest.raises(MControllerError) as raised:
        group_of().arguments(3)
    assert (raised.value.role, raised.value.method, raised.value.mode) == ("actor", "arguments", "ALL_TO_ALL")
