"""What is sent to which rank, how often, and what stays on the workers.

Ranks 0, 1 and 2, 3 of ``wide`` are replicas (tp=2, dp=2); ``other`` splits a batch over 2 ranks, ``third`` over 3.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray._private import internal_api

from mcontroller.data.batch import DataProto
from mcontroller.errors import GroupError, WorkerDied, WorkerError
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from mcontroller.ray.calls import executor, supervision
from parallel_state import ParallelLayout, Topology
from tests.mcontroller.ray.batch_roles import Batches, Chained

LARGE, SMALL = 100_000, 64


@pytest.fixture(scope="module")
def groups(ray_cluster: None) -> Iterator[dict[str, RayWorkerGroup]]:
    """Groups on separate pools."""
    layouts = {"wide": ParallelLayout(4, tp=2), "other": ParallelLayout(2), "third": ParallelLayout(3)}
    groups = {}
    for name, layout in layouts.items():
        pool = RayResourcePool([layout.world_size], use_gpu=False, name_prefix=name)
        init = RayClassWithInitArgs(Batches)
        groups[name] = RayWorkerGroup(pool, init, name_prefix=name, topology=Topology.from_layout(layout))
    yield groups
    for group in groups.values():
        group.shutdown()


@pytest.fixture
def wide(groups: dict[str, RayWorkerGroup]) -> RayWorkerGroup:
    return groups["wide"]


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All values that the controller puts into the object store."""
    stored: list[Any] = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: (stored.append(value), put(value))[1])
    return stored


def batch(elements: int) -> DataProto:
    ids = torch.arange(elements).view(8, -1)
    return DataProto.from_dict({"ids": ids}, {"name": [f"row {row}" for row in range(8)]}, {"seed": 7})


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_a_batch_comes_back_as_it_went(wide: RayWorkerGroup, elements: int) -> None:
    assert wide.same(batch(elements)) == batch(elements)


def test_a_shard_is_stored_once_whatever_the_number_of_its_replicas(wide: RayWorkerGroup, puts: list[Any]) -> None:
    wide.same(batch(LARGE))
    assert [packed.nbytes > LARGE * 8 / 2 for packed in puts] == [True, True]


def test_of_a_batch_with_columns_on_workers_only_the_controllers_are_sent(
    groups: dict[str, RayWorkerGroup], puts: list[Any]
) -> None:
    generated = groups["wide"].same_later(batch(LARGE))
    assert len(generated) == 8
    puts.clear()
    scores = DataProto.from_dict({"score": torch.arange(8.0)})
    whole = batch(LARGE).union(scores)
    order = torch.tensor([5, 0, 7, 7, 1])
    for consumer in (groups["other"], groups["third"]):
        assert consumer.same(generated.union(scores)) == whole
        assert consumer.same(generated.union(scores).select_idxs(order)) == whole.select_idxs(order)
    assert puts == []
    assert generated == batch(LARGE)


def test_a_small_batch_goes_inline_and_is_not_stored(wide: RayWorkerGroup, puts: list[Any]) -> None:
    wide.same(batch(SMALL))
    assert puts == []


def test_one_argument_for_all_ranks_is_stored_once(wide: RayWorkerGroup, puts: list[Any]) -> None:
    assert wide.total(torch.ones(LARGE)) == [LARGE] * 4
    assert len(puts) == 1


def test_a_plain_argument_of_a_batch_is_stored_once_and_private_to_each_rank(
    wide: RayWorkerGroup, puts: list[Any]
) -> None:
    plain = torch.ones(LARGE)
    sums = wide.with_plain(batch(SMALL), plain)
    assert sums.batch["sum"].tolist() == [2 * LARGE] * 8
    assert plain.sum() == LARGE
    assert len(puts) == 1


def test_replicas_write_into_one_shard_and_nobody_else_sees_it(wide: RayWorkerGroup) -> None:
    given = batch(LARGE)
    written = wide.scribble(given)
    assert written.batch["ids"][:, 0].tolist() == [0] * 4 + [2] * 4
    assert given == batch(LARGE)


def test_ranks_that_are_not_collected_drop_their_values_before_serialization(wide: RayWorkerGroup) -> None:
    assert wide.unshippable_unless_collected(batch(SMALL)) == batch(SMALL)


def test_a_future_goes_from_worker_to_worker_and_each_fetches_its_own_shard(groups: dict[str, RayWorkerGroup]) -> None:
    groups["other"].count_fetched()
    future = groups["wide"].same_later(batch(LARGE))
    assert groups["other"].same(future) == batch(LARGE)
    assert groups["other"].count_fetched() == [1, 1]


def test_unequal_splits_fetch_only_the_shards_that_overlap(groups: dict[str, RayWorkerGroup]) -> None:
    groups["third"].count_fetched()
    future = groups["wide"].same_later(batch(LARGE))
    assert groups["third"].same(future) == batch(LARGE)
    assert groups["third"].count_fetched() == [1, 2, 1]


def test_a_future_is_not_fetched_by_the_controller_on_its_way(
    groups: dict[str, RayWorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[tuple[bytes, int]] = []
    fetch = executor.fetch

    def counting(handles: Sequence[Any], timeout: float | None = None) -> list[Any]:
        fetched.extend((handle.caller, handle.number) for handle in handles if not handle.outline)
        return fetch(handles, timeout)

    for module in (executor, supervision):
        monkeypatch.setattr(module, "fetch", counting)
    first = groups["wide"].same_later(batch(LARGE))
    chained = groups["third"].same_later(first)
    assert chained.wait(60)
    assert fetched == []
    assert chained.get() == batch(LARGE)
    assert len(set(fetched)) == 1  # the last call


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_a_result_that_was_not_read_is_readable_after_shutdown(ray_cluster: None, elements: int) -> None:
    pool = RayResourcePool([2], use_gpu=False, name_prefix="ending")
    init, topology = RayClassWithInitArgs(Batches), Topology.from_layout(ParallelLayout(2))
    group = RayWorkerGroup(pool, init, name_prefix="ending", topology=topology)
    result = group.same_later(batch(elements))
    assert result.wait(60)
    group.shutdown()
    assert result.get() == batch(elements)


def test_nothing_stays_in_shared_memory_after_a_group(groups: dict[str, RayWorkerGroup]) -> None:
    def used() -> int:
        state = internal_api.get_state_from_address(ray.get_runtime_context().gcs_address)
        return internal_api.get_memory_info_reply(state).store_stats.object_store_bytes_used

    gc.collect()
    before = used()
    with RayResourcePool([1], use_gpu=False, name_prefix="brief") as pool:
        with RayWorkerGroup(pool, RayClassWithInitArgs(Batches), name_prefix="brief") as group:
            sums = group.total(torch.ones(4 * LARGE))
            kept = group.execute_func_rank_zero(torch.ones, 4 * LARGE)
        assert (sums, kept.sum()) == ([4 * LARGE], 4 * LARGE)
    del kept, group
    gc.collect()
    waited = threading.Event()
    assert any(used() <= before or waited.wait(0.1) for _ in range(300))


def test_groups_on_different_pools_run_at_the_same_time(groups: dict[str, RayWorkerGroup], tmp_path: Path) -> None:
    left, right = str(tmp_path / "left"), str(tmp_path / "right")
    first = groups["wide"].meet(left, right)
    second = groups["other"].meet(right, left)
    assert all(first.get() + second.get())


def test_a_consumer_of_a_failed_future_raises_its_error_and_stays_intact(
    groups: dict[str, RayWorkerGroup],
) -> None:
    with RayResourcePool([1], use_gpu=False, name_prefix="lone") as pool:
        failing = RayWorkerGroup(
            pool, RayClassWithInitArgs(Batches), name_prefix="failing", topology=Topology.from_layout(ParallelLayout(1))
        )
        future = failing.fail_later(batch(SMALL))
        with pytest.raises(WorkerError) as caught:
            groups["wide"].same(future)
        assert caught.value.role == "failing"
        assert groups["wide"].same(batch(SMALL)) == batch(SMALL)
        with pytest.raises(GroupError) as broken:
            failing.count_fetched()
        assert "no batch from here" in str(broken.value)


@pytest.mark.parametrize(("reader", "dies"), [("reader", True), ("maker", False)])
def test_a_lost_argument_raises_the_error_of_the_rank_that_produced_it(
    start: Callable[..., RayWorkerGroup], reader: str, dies: bool
) -> None:
    making, reading = start("maker", Chained), start(reader, Chained)
    pid = making.pid()[1]
    with pytest.raises(GroupError) as caught:
        reading.passed(making.made_but_on_rank_1(batch(SMALL), dies))
    assert isinstance(caught.value, WorkerDied if dies else WorkerError)
    fields = caught.value.fields
    assert (fields["role"], fields["rank"], fields["pid"]) == ("maker", 1, pid)
    assert fields["method"] == "made_but_on_rank_1"


def test_a_cancelled_call_of_kept_rows_ends_alone(groups: dict[str, RayWorkerGroup], tmp_path: Path) -> None:
    wide, other, go = groups["wide"], groups["other"], tmp_path / "go"
    running = wide.meet(str(tmp_path / "begun"), str(go))
    cancelled, later = wide.same_later(batch(SMALL)), wide.same_later(batch(SMALL))
    cancelled.cancel()
    go.touch()
    assert running.get() == [True] * 4
    assert later.get() == batch(SMALL)
    for read in (cancelled.get, lambda: other.same(cancelled)):
        with pytest.raises(GroupError) as caught:
            read()
        assert caught.value.fields == {"role": "wide", "method": "same_later"}
    assert wide.same(batch(SMALL)) == other.same(batch(SMALL)) == batch(SMALL)
