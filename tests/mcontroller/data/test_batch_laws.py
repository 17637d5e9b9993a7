"""Laws of DataProto's row operations, over batches that hold a column of every kind."""

from __future__ import annotations

import copy

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcontroller.data.batch import (
    DataProto,
    collate_fn,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from tests.mcontroller.batches import every_kind, numbered, numbers, row_counts
from tests.parallel_state.layouts import unhurried

DENSE = ["ids", "mask", "score", "bfloat", "float8", "unsigned", "nothing", "columns_first", "nested"]


@unhurried
@given(row_counts, st.integers(1, 20))
def test_concat_undoes_chunk(rows: int, chunks: int) -> None:
    batch = every_kind(rows)
    parts = batch.chunk(chunks)
    sizes = [len(part) for part in parts]
    assert len(parts) == chunks and sum(sizes) == rows and max(sizes) - min(sizes) <= 1
    assert DataProto.concat(parts).difference(batch) is None


@unhurried
@given(st.integers(1, 17), st.integers(1, 20))
def test_concat_undoes_split(rows: int, size: int) -> None:
    batch = every_kind(rows)
    parts = batch.split(size)
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert DataProto.concat(parts).difference(batch) is None


@unhurried
@given(row_counts, st.data())
def test_reorder_by_the_inverse_restores_the_batch(rows: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(rows)))
    batch = every_kind(rows)
    batch.reorder(order)
    assert batch.non_tensor_batch["level"].tolist() == order
    batch.reorder(np.argsort(np.array(order, dtype=np.int64)))
    assert batch.difference(every_kind(rows)) is None


@unhurried
@given(row_counts, st.integers(0, 4), st.booleans())
def test_repeat_is_a_choice_of_rows(rows: int, times: int, interleave: bool) -> None:
    batch = every_kind(rows)
    repeated = batch.repeat(times, interleave)
    expected = [row for row in range(rows) for _ in range(times)] if interleave else [*range(rows)] * times
    assert repeated.difference(batch.select_idxs(expected)) is None
    assert repeated.batch["ids"][:, 0].tolist() == [row * 10 for row in expected]


@unhurried
@given(row_counts, st.data())
def test_every_way_to_name_rows_gives_the_same_rows(rows: int, data: st.DataObject) -> None:
    batch = every_kind(rows)
    mask = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    index = [row for row in range(rows) if mask[row]]
    by_list = batch[index]
    assert len(by_list) == len(index)
    assert by_list.non_tensor_batch["level"].tolist() == index
    for other in (np.array(mask, dtype=bool), torch.tensor(mask, dtype=torch.bool), [row - rows for row in index]):
        assert batch[other].difference(by_list) is None


@unhurried
@given(row_counts, st.integers(-20, 20), st.integers(-20, 20), st.sampled_from([-3, -1, 1, 2, 5]))
def test_a_slice_is_what_a_slice_of_a_list_is(rows: int, start: int, stop: int, step: int) -> None:
    sliced = every_kind(rows)[start:stop:step]
    expected = list(range(rows))[start:stop:step]
    assert sliced.non_tensor_batch["level"].tolist() == expected
    assert sliced.difference(every_kind(rows).select_idxs(expected)) is None


@unhurried
@given(st.integers(1, 17), st.integers(1, 8))
def test_unpad_undoes_padding_to_a_divisor(rows: int, divisor: int) -> None:
    batch = every_kind(rows)
    padded, pad_size = pad_dataproto_to_divisor(batch, divisor)
    assert len(padded) % divisor == 0 and 0 <= pad_size < divisor
    assert unpad_dataproto(padded, pad_size).difference(batch) is None


@unhurried
@given(st.integers(1, 9))
def test_collating_the_items_of_a_batch_gives_the_batch(rows: int) -> None:
    batch = every_kind(rows).select(DENSE, ["uid", "turns"])
    assert collate_fn(list(batch)).difference(batch) is None


@unhurried
@given(st.integers(1, 17), st.integers(1, 6), st.integers(1, 3))
def test_an_iterator_passes_every_row_once_an_epoch(rows: int, size: int, epochs: int) -> None:
    shuffled = {"shuffle": True}
    passed = [numbers(part) for part in numbered(rows).make_iterator(size, epochs, 3, shuffled)]
    again = [numbers(part) for part in numbered(rows).make_iterator(size, epochs, 3, shuffled)]
    assert passed == again
    per_epoch = -(-rows // size)
    for epoch in range(epochs):
        rows_of_epoch = [row for part in passed[epoch * per_epoch : (epoch + 1) * per_epoch] for row in part]
        assert sorted(rows_of_epoch) == list(range(rows))


@unhurried
@given(row_counts)
def test_operations_leave_the_batch_they_are_called_on_as_it_was(rows: int) -> None:
    batch, before = every_kind(rows), every_kind(rows)
    made = [
        *batch.chunk(3), *batch.split(2), batch[:1], batch[[0] * min(rows, 1)], batch.select("ids"), batch.repeat(2),
        batch.slice().to("cpu"), batch.union(numbered(rows, more=1)), DataProto.concat([batch]), batch.unpad(0),
        batch.slice().padding(int(rows > 0)), copy.copy(batch),
    ]  # fmt: skip
    for part in made:
        part.meta_info["stops"][1].append("c")
        part.meta_info["new"] = 1
        part.non_tensor_batch.clear()
        part.rename("ids", "renamed")
        part.pop("renamed")
    assert batch.difference(before) is None
