"""The law of dispatch, ``collect(execute(dispatch(x))) == x``, over every mode, topology and batch length."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch, DispatchSpec
from mcontroller.errors import DataError
from parallel_state.topology import Topology
from tests.mcontroller.batches import every_kind, numbered, numbers, row_counts
from tests.mcontroller.groups import Echo, group_on, method, received, topologies, topology_of
from tests.parallel_state.layouts import unhurried

ROW_MODES = [Dispatch.MEGATRON_COMPUTE_PROTO, Dispatch.MEGATRON_PP_AS_DP_PROTO, Dispatch.DP_COMPUTE_PROTO]
ENTRY_MODES = [Dispatch.MEGATRON_COMPUTE, Dispatch.MEGATRON_PP_AS_DP, Dispatch.DP_COMPUTE, Dispatch.ALL_TO_ALL]
brief = settings(unhurried, max_examples=30)
paddings_kept = st.sampled_from([None, "none"])
paddings = st.sampled_from([None, "spread", "repeat", "zero_loss", "none"])


@st.composite
def calls(draw: st.DrawFn) -> tuple[Topology, DispatchSpec]:
    """A topology, and a mode that splits rows over axes of one of its grids: a row of the table, or a custom mode."""
    topology = draw(topologies())
    if draw(st.booleans()):
        return topology, draw(st.sampled_from(ROW_MODES))
    grid = draw(st.sampled_from([topology.dense_axes, topology.expert_axes]))
    axes = draw(st.lists(st.sampled_from(grid), min_size=1, unique=True))
    others = [axis for axis in grid if axis not in axes]
    named = draw(st.lists(st.sampled_from(others), unique=True)) if others else []
    collect = {axis: draw(st.sampled_from([0, -1])) for axis in named}
    return topology, Dispatch.over(*axes, collect=collect)


def with_mask(batch: DataProto) -> DataProto:
    """The batch with the loss mask that zero-loss padding needs, all ones."""
    ones = batch.batch["ids"].new_ones(len(batch), 2)  # type: ignore[index]
    return batch.union(DataProto.from_dict({"response_mask": ones}))


@unhurried
@given(calls(), row_counts, paddings)
def test_identity_returns_the_batch(call: tuple[Topology, DispatchSpec], rows: int, padding: Any) -> None:
    topology, mode = call
    batch = with_mask(every_kind(rows))
    before = copy.deepcopy(batch)
    result = method(group_on(topology), "identity", mode, padding=padding)(batch)
    assert result.difference(batch) is None
    assert batch.difference(before) is None


@unhurried
@given(calls(), row_counts, st.data())
def test_identity_returns_a_balanced_batch_and_keeps_groups_together(
    call: tuple[Topology, DispatchSpec], rows: int, data: st.DataObject
) -> None:
    topology, mode = call
    labels = data.draw(st.lists(st.sampled_from("abcd"), min_size=rows, max_size=rows))
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    batch = numbered(rows)
    batch.non_tensor_batch["uid"] = DataProto.from_dict(None, {"uid": labels}).non_tensor_batch["uid"]
    batch.batch["length"] = batch.batch["n"].new_tensor(lengths)  # type: ignore[index]
    group = group_on(topology)
    result = method(group, "identity", mode, balance="length", group_by="uid", padding=data.draw(paddings_kept))(batch)
    assert result.difference(batch) is None
    shards_of: dict[str, set[tuple[int, ...]]] = {}
    for rank_batch in received(group):
        part = tuple(rank_batch.batch["n"].tolist())  # type: ignore[index]
        for label in rank_batch.non_tensor_batch["uid"]:
            shards_of.setdefault(label, set()).add(part)
    if group_is_unpadded(group, rows):
        assert all(len(shards) == 1 for shards in shards_of.values())


@brief
@given(calls(), st.integers(1, 20), st.sampled_from([2, 3]), st.booleans(), paddings)
def test_rows_together_are_neighbors_in_one_shard_with_their_padding(
    call: tuple[Topology, DispatchSpec], units: int, together: int, balance: bool, padding: Any
) -> None:
    topology, mode = call
    batch = numbered(units * together)
    batch.batch["loss_mask"] = torch.ones(len(batch), 1)  # type: ignore[index]
    batch.meta_info["rows_together"] = together
    batch.batch["length"] = batch.batch["n"] % 7  # type: ignore[index]
    group = group_on(topology)
    options = {"padding": padding, "balance": "length" if balance else None}
    assert method(group, "identity", mode, **options)(batch).difference(batch) is None
    for shard in received(group):
        rows = shard.batch["n"].view(-1, together)  # type: ignore[index]
        assert (rows == rows[:, :1] + torch.arange(together)).all() and not (rows[:, 0] % together).any()
    batch.meta_info["rows_together"] = together + units * together
    with pytest.raises(DataError) as raised:
        method(group, "identity", mode)(batch)
    assert (raised.value.key, raised.value.rows) == ("rows_together", len(batch))


def test_batches_of_one_call_keep_what_each_of_them_has_together() -> None:
    pairs, triples = numbered(24, rows_together=2), numbered(24, rows_together=3)
    group = group_on(4)
    assert numbers(method(group, "identity", Dispatch.DP_COMPUTE_PROTO)(pairs, triples)) == list(range(24))
    assert [numbers(shard)[0] % 6 for shard in received(group)] == [0] * 4
    with pytest.raises(DataError):
        method(group, "identity", Dispatch.DP_COMPUTE_PROTO)(pairs, numbered(24, rows_together=5))


def group_is_unpadded(group: Any, rows: int) -> bool:
    """Whether no row went to two shards: each is seen in one shard's batch only."""
    shards = {tuple(batch.batch["n"].tolist()) for batch in received(group)}
    sent = [row for shard in shards for row in shard]
    return len(sent) == len(set(sent)) == rows


@unhurried
@given(calls(), row_counts)
def test_every_row_reaches_each_rank_of_its_shard_and_every_rank_has_one(
    call: tuple[Topology, DispatchSpec], rows: int
) -> None:
    topology, mode = call
    group = group_on(topology)
    method(group, "identity", mode)(numbered(rows))
    rank_rows = [numbers(batch) for batch in received(group)]
    shard_of = topology.shard_indices(mode.axes)
    assert all(
        rank_rows[a] == rank_rows[b]
        for a in range(len(rank_rows))
        for b in range(len(rank_rows))
        if shard_of[a] == shard_of[b]
    )
    by_shard = [rank_rows[shard_of.index(shard)] for shard in range(topology.shard_count(mode.axes))]
    assert {row for shard in by_shard for row in shard} == set(range(rows))
    assert all(by_shard) or rows == 0
    sizes = [len(shard) for shard in by_shard]
    assert max(sizes) - min(sizes) <= 1


@brief
@given(calls(), row_counts, st.integers(0, 3), paddings)
def test_a_method_that_makes_several_rows_of_each_comes_back_in_order(
    call: tuple[Topology, DispatchSpec], rows: int, times: int, padding: Any
) -> None:
    topology, mode = call
    batch = with_mask(every_kind(rows))
    result = method(group_on(topology), "repeated", mode, padding=padding)(batch, times)
    assert result.difference(batch.repeat(times, interleave=True)) is None


@unhurried
@given(topologies(), st.sampled_from(ENTRY_MODES))
def test_list_modes_give_each_rank_the_entry_of_its_coordinates(topology: Topology, mode: DispatchSpec) -> None:
    count = topology.shard_count(mode.axes)
    entries = [f"entry {shard}" for shard in range(count)]
    group = group_on(topology)
    result = method(group, "rank_and_arguments", mode)(entries, key=list(range(count)))
    for shard, (rank, args, kwargs) in enumerate(result):
        assert args == (entries[shard],) and kwargs == {"key": shard}
        assert coordinates_on(topology, rank, mode.axes) == digits(shard, [topology.size(axis) for axis in mode.axes])
        for axis, index in mode.collect:
            assert topology.coordinates(rank)[axis] == index % topology.size(axis)
    assert len(result) == count


def coordinates_on(topology: Topology, rank: int, axes: tuple[str, ...]) -> list[int]:
    return [rank] if axes == ("rank",) else [topology.coordinates(rank)[axis] for axis in axes]


def digits(number: int, sizes: list[int]) -> list[int]:
    """The number in a mixed radix, most significant first: the shard's index on each axis."""
    indices = []
    for size in reversed(sizes):
        number, digit = divmod(number, size)
        indices.insert(0, digit)
    return indices


@brief
@given(calls(), calls(), row_counts, paddings_kept)
def test_a_future_passed_on_has_the_same_result_as_waiting(
    first: tuple[Topology, DispatchSpec], second: tuple[Topology, DispatchSpec], rows: int, padding: Any
) -> None:
    batch = every_kind(rows)
    producer, consumer = group_on(first[0]), group_on(second[0], name="consumer")
    future = method(producer, "identity", first[1], blocking=False, padding=padding)(batch)
    chained = method(consumer, "repeated", second[1], blocking=False)(future, 2)
    assert chained.get().difference(batch.repeat(2, interleave=True)) is None
    assert method(consumer, "identity", second[1])(chained).difference(batch.repeat(2, interleave=True)) is None
    assert future.get().difference(batch) is None


@brief
@given(calls(), row_counts, st.integers(1, 7))
def test_futures_chunk_and_join_as_batches_do(call: tuple[Topology, DispatchSpec], rows: int, chunks: int) -> None:
    topology, mode = call
    batch = every_kind(rows)
    group = group_on(topology)
    future = method(group, "identity", mode, blocking=False)(batch)
    parts = future.chunk(chunks)
    for part, expected in zip(parts, batch.chunk(chunks), strict=True):
        assert part.get().difference(expected) is None
    joined = type(future).concat([*reversed(parts), future])
    expected = DataProto.concat([*reversed(batch.chunk(chunks)), batch])
    assert joined.get().difference(expected) is None
    assert method(group, "identity", mode)(joined).difference(expected) is None


@brief
@given(calls(), row_counts, st.data())
def test_a_batch_next_to_a_future_is_split_as_the_future_is(
    call: tuple[Topology, DispatchSpec], rows: int, data: st.DataObject
) -> None:
    topology, mode = call
    assume(rows > 0)
    producer = group_on(data.draw(topologies()))
    lengths = numbered(rows)
    future = method(producer, "identity", Dispatch.MEGATRON_COMPUTE_PROTO, blocking=False, balance="n")(lengths)
    group = group_on(topology)
    result = method(group, "identity", mode)(future, numbered(rows), again=future)
    assert numbers(result) == list(range(rows))
    for worker in group.executor.workers:  # type: ignore[attr-defined]
        batch, (beside,), more = worker.received[-1]
        assert numbers(batch) == numbers(beside) == numbers(more["again"])


def test_the_same_holds_for_sixty_four_ranks_and_a_batch_that_does_not_divide() -> None:
    group = group_on(topology_of(64, tp=2, pp=4, cp=2), Echo)
    for rows in (0, 1, 3, 4, 63, 65):
        assert method(group, "identity", Dispatch.MEGATRON_PP_AS_DP_PROTO)(every_kind(rows)) == every_kind(rows)
