"""DataProto: its fields, its operations and its errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from mcontroller.data.batch import (
    DataProto,
    DataProtoConfig,
    DataProtoItem,
    collate_fn,
    pad_dataproto_to_divisor,
)
from mcontroller.data.columns import RowIndexError
from mcontroller.errors import DataError
from tests.mcontroller.batches import every_kind, numbered, numbers


def test_from_dict_makes_object_columns_of_lists_of_equal_length_too() -> None:
    batch = DataProto.from_dict({"a": torch.zeros(2, 3)}, {"pairs": [[1, 2], [3, 4]]})
    assert batch.non_tensor_batch["pairs"].shape == (2,)
    assert batch.non_tensor_batch["pairs"].tolist() == [[1, 2], [3, 4]]


def test_from_single_dict_separates_tensors_from_arrays() -> None:
    batch = DataProto.from_single_dict(
        {"a": torch.arange(3), "n": np.arange(3), "s": ["x", "y", "z"]}, meta_info={"step": 1}, auto_padding=True
    )
    assert list(batch.batch.keys()) == ["a"]
    assert batch.non_tensor_batch["n"].dtype == np.int64
    assert batch.meta_info == {"step": 1, DataProtoConfig.auto_padding_key: True}
    assert batch.is_padding_enabled()


def test_auto_padding_for_the_whole_process_is_off_until_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not numbered(2).is_padding_enabled()
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert numbered(2).is_padding_enabled()


def test_from_tensordict_moves_non_tensor_data_to_the_other_fields() -> None:
    source = TensorDict({"a": torch.arange(2)}, [2])
    source["uid"] = NonTensorStack("x", "y")
    source["temperature"] = NonTensorData(0.7, batch_size=[2])
    batch = DataProto.from_tensordict(source, meta_info={"step": 1})
    assert batch.batch["a"].tolist() == [0, 1]
    assert batch.non_tensor_batch["uid"].tolist() == ["x", "y"]
    assert batch.meta_info == {"step": 1, "temperature": 0.7}
    with pytest.raises(DataError) as raised:
        DataProto.from_tensordict(source, meta_info={"temperature": 1.0})
    assert raised.value.key == "temperature"


def test_num_batch_dims_counts_leading_dims_of_the_batch() -> None:
    batch = DataProto.from_dict({"a": torch.zeros(4, 2, 3), "b": torch.zeros(4, 2)}, num_batch_dims=2)
    assert batch.batch.batch_size == (4, 2)
    assert [part.batch.batch_size for part in batch.chunk(2)] == [(2, 2), (2, 2)]


def test_the_number_of_rows_is_that_of_the_columns() -> None:
    assert len(numbered(5)) == 5
    assert len(DataProto(non_tensor_batch={"a": np.arange(3)})) == 3
    assert len(DataProto(meta_info={"step": 1})) == 0
    assert len(numbered(5).select([], [])) == 5


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}), ("b", (3,), (2,))),
        (lambda: DataProto.from_dict({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}, None, None, 2), ("b", (2, 4))),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"u": ["x"]}), ("u", 1, 2)),
        (lambda: DataProto.from_dict({"a": torch.zeros(())}), ("a",)),
        (lambda: DataProto.from_dict({"a": ["x", "y"]}), ("a", "list")),
        (lambda: DataProto.from_dict({}, {"u": "text"}), ("u",)),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, num_batch_dims=0), (0,)),
        (lambda: DataProto.from_dict({"a": torch.zeros(2, 2)}, {"u": [1, 2]}, None, 2), (2,)),
        (lambda: DataProto.from_single_dict({"a": "text"}), ("a",)),
        (lambda: DataProto(batch={"a": torch.zeros(2)}), ("dict",)),
        (lambda: DataProto(batch=TensorDict({"a": torch.zeros(2)}, [])), ("TensorDict",)),
        (lambda: DataProto(non_tensor_batch={"u": ["x"]}), ("u",)),
        (lambda: DataProto.from_dict({"s": torch.eye(2).to_sparse()}), ("s",)),
        (lambda: DataProto(TensorDict({"a": NonTensorData(1, batch_size=[2])}, [2])), ("a",)),
        (lambda: DataProto.from_dict({"n": TensorDict({"s": NonTensorStack("x", "y")}, [2])}), ("n",)),
        (lambda: DataProto.from_dict({"n": TensorDict({"s": torch.eye(2).to_sparse()}, [2])}), ("n",)),
        (lambda: DataProto.from_dict({"j": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}), ("j",)),
    ],
)
def test_invalid_columns_are_rejected_with_their_name_and_numbers(make: Any, fields: tuple[Any, ...]) -> None:
    with pytest.raises(DataError) as raised:
        make()
    assert tuple(raised.value.fields.values())[: len(fields)] == fields


def test_an_item_is_one_row_without_its_row_dim() -> None:
    item = every_kind(5)[-2]
    assert isinstance(item, DataProtoItem)
    assert item.batch["ids"].tolist() == [30, 31, 32, 33]
    assert item.non_tensor_batch["uid"] == "row 3"
    assert item.meta_info["temperature"] == 0.5


@pytest.mark.parametrize("wrong", [5, -6, [0, 5], torch.tensor([-6])])
def test_a_row_that_does_not_exist_is_an_index_error_with_the_numbers(wrong) -> None:
    with pytest.raises(RowIndexError) as raised:
        numbered(5)[wrong]
    assert isinstance(raised.value, IndexError) and raised.value.rows == 5
    assert [item.batch["n"].item() for item in numbered(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("wrong", [[True], [0.5], [[0]], "ab"])
def test_an_invalid_index_is_rejected(wrong: Any) -> None:
    with pytest.raises(DataError) as raised:
        numbered(5).select_idxs(wrong)
    assert raised.value.fields and not isinstance(raised.value, RowIndexError)


def test_slices_and_selections_share_memory_and_index_lists_copy() -> None:
    batch = numbered(6)
    memory = batch.batch["n"].untyped_storage().data_ptr()
    views = [batch[1:3], *batch.chunk(2), *batch.split(4), batch.select("n")]
    for view in views:
        assert view.batch["n"].untyped_storage().data_ptr() == memory
    for copied in (batch[[1, 2]], DataProto.concat([batch]), next(batch.make_iterator(6, 1))):
        assert copied.batch["n"].untyped_storage().data_ptr() != memory


def test_chunks_share_no_part_of_meta_info() -> None:
    first, second = numbered(2, nested={"list": [1]}).chunk(2)
    first.meta_info["nested"]["list"].append(2)
    assert second.meta_info == {"nested": {"list": [1]}}


def test_select_takes_names_or_lists_and_shares_or_copies_memory() -> None:
    batch = numbered(3, a=1, b=2)
    selected = batch.select("n", [], "a")
    assert (selected.batch["n"].tolist(), selected.non_tensor_batch, selected.meta_info) == ([0, 1, 2], {}, {"a": 1})
    batch.select(deepcopy=True).batch["n"][0] = 9
    assert numbers(batch) == [0, 1, 2]
    selected.batch["n"][0] = 9
    assert batch.batch["n"][0] == 9


def test_pop_removes_columns_from_the_batch_and_from_no_other() -> None:
    batch = numbered(3, a=1)
    other = batch.select()
    popped = batch.pop(batch_keys=["n"], non_tensor_batch_keys="name", meta_info_keys=["a"])
    assert numbers(popped) == [0, 1, 2] and popped.meta_info == {"a": 1}
    assert (batch.column_names(), batch.meta_info, len(batch)) == ([], {}, 3)
    assert numbers(other) == [0, 1, 2]


def test_rename_keeps_the_order_of_columns_and_returns_the_batch_itself() -> None:
    batch = DataProto.from_dict({"a": torch.zeros(1), "b": torch.ones(1)}, {"u": ["x"]})
    assert batch.rename(["a", "u"], ["c", "v"]) is batch
    assert batch.column_names() == ["c", "b", "v"]
    assert batch.rename("b", "a").batch["a"].item() == 1


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (lambda batch: batch.select("x"), {"missing": ["x"], "present": ["n"]}),
        (lambda batch: batch.select(non_tensor_batch_keys="x"), {"missing": ["x"], "present": ["name"]}),
        (lambda batch: batch.pop(meta_info_keys=["x"]), {"missing": ["x"], "present": [1, "a"]}),
        (lambda batch: batch.rename("x", "y"), {"missing": ["x"], "present": ["n", "name"]}),
        (lambda batch: batch.rename("n", "name"), {"old": ["n"], "new": ["name"]}),
        (lambda batch: batch.rename(["n", "name"], "a"), {"old": ["n", "name"], "new": ["a"]}),
        (lambda batch: batch.chunk(0), {"chunks": 0}),
        (lambda batch: batch.split(0), {"split_size": 0}),
        (lambda batch: batch.repeat(-1), {"repeat_times": -1}),
        (lambda batch: batch.reorder([0, 0, 1, 2, 3]), {"rows": 5, "indices": 5}),
        (lambda batch: batch.padding(1, "middle"), {"padding_candidate": "middle"}),
        (lambda batch: batch.select_idxs([]).padding(1), {"rows": 0}),
        (lambda batch: batch.unpad(6), {"rows": 5}),
        (lambda batch: batch.make_iterator(0, 1), {"mini_batch_size": 0}),
        (lambda batch: batch.union(numbered(4)), {"rows": (5, 4)}),
        (lambda batch: pad_dataproto_to_divisor(batch, 0), {"size_divisor": 0}),
    ],
)
def test_invalid_arguments_are_rejected_and_change_nothing(call: Any, fields: dict[str, Any]) -> None:
    batch = DataProto(numbered(5).batch, numbered(5).non_tensor_batch, {"a": 0, 1: 0})
    before = copy.copy(batch)
    with pytest.raises(DataError) as raised:
        call(batch)
    assert raised.value.fields == fields
    assert batch == before


def test_union_adds_columns_and_takes_equal_ones_once() -> None:
    batch = numbered(2, a=1)
    other = DataProto.from_dict({"n": torch.arange(2), "m": torch.ones(2)}, {"v": ["x", "y"]}, {"b": 2})
    united = batch.union(other)
    assert united.column_names() == ["n", "m", "name", "v"]
    assert united.meta_info == {"a": 1, "b": 2}
    assert batch == numbered(2, a=1)
    assert batch.union(DataProto(meta_info={"b": 2})) == numbered(2, a=1, b=2)
    assert DataProto().union(batch) == batch


def test_union_rejects_a_column_or_key_with_two_values() -> None:
    def batch(name: str, value: float) -> DataProto:
        return DataProto.from_dict({"a": torch.full((2,), value)}, {"u": [name, name]})

    wide = DataProto.from_dict({"b": torch.zeros(2, 3)}, num_batch_dims=2)
    rejected = [
        (lambda: batch("x", 0.0).union(batch("x", 1.0)), {"column": "a"}),
        (lambda: batch("x", 0.0).union(batch("y", 0.0)), {"column": "u"}),
        (lambda: batch("x", 0.0).union(wide), {"batch_sizes": ([2], [2, 3])}),
        (lambda: numbered(2, a=1).union(numbered(2, a=2)), {"key": "a", "parts": (0, 1), "values": (1, 2)}),
    ]
    for unite, fields in rejected:
        with pytest.raises(DataError) as raised:
            unite()
        assert raised.value.fields == fields


def test_concat_rejects_parts_that_differ_in_columns_shape_or_dtype() -> None:
    part = DataProto.from_dict({"a": torch.zeros(2, 3)}, {"u": [1, 2]})

    def other(tensor: torch.Tensor, name: str = "a") -> DataProto:
        return DataProto.from_dict({name: tensor}, {"u": [1, 2]})

    def words(values: list[Any]) -> DataProto:
        return DataProto.from_dict(non_tensors={"w": np.array(values)})

    assert DataProto.concat([words([]), words(["a"]), words(["bc"])]) == words(["a", "bc"])
    rejected: list[tuple[Any, dict[str, Any]]] = [
        ([part, other(torch.zeros(2, 3), "b")], {"part": 1, "columns": ["b"], "expected": ["a"]}),
        ([part, DataProto.from_dict({"a": torch.zeros(2, 3)})], {"part": 1, "columns": [], "expected": ["u"]}),
        ([part, DataProto.from_dict({}, {"u": [1, 2]})], {"part": 1}),
        ([part, other(torch.zeros(2, 4))], {"column": "a", "part": 1, "actual": "float32[2, 4]"}),
        ([part, DataProto.from_dict({"a": torch.zeros(0, 4)}, {"u": []})], {"column": "a", "actual": "float32[0, 4]"}),
        ([part, other(torch.zeros(2, 3).long())], {"column": "a", "part": 1, "actual": "int64[2, 3]"}),
        ([words([3, 4]), words(["a"])], {"column": "w", "part": 1, "actual": "<U1[1]", "expected": "int64[2]"}),
        ([words([[3, 4]]), words([[3]])], {"column": "w", "part": 1, "actual": "int64[1, 1]"}),
        ([], {"types": []}),
        (part, {"type": "DataProto"}),
        ([part, {}], {"types": ["dict"]}),
    ]
    for parts, fields in rejected:
        with pytest.raises(DataError) as raised:
            DataProto.concat(parts)
        assert raised.value.fields.items() >= fields.items()


def test_large_columns_are_joined_and_chosen_as_small_ones_are() -> None:
    column = torch.arange(3 << 20).reshape(-1, 1024)
    tensors = {"ids": column, "float8": torch.ones(9 << 20, 1).to(torch.float8_e4m3fn)[: len(column)]}
    batch = DataProto.from_dict(tensors)
    assert DataProto.concat(batch.chunk(5)) == batch
    order = torch.randperm(len(column), generator=torch.Generator().manual_seed(0))
    assert torch.equal(batch[order].batch["ids"], column[order])


def test_padding_repeats_a_row_and_pads_in_a_cycle_to_a_divisor() -> None:
    assert numbers(numbered(3).padding(2)) == [0, 1, 2, 2, 2]
    assert numbers(numbered(3).padding(2, "first")) == [0, 1, 2, 0, 0]
    padded, pad_size = pad_dataproto_to_divisor(numbered(3), 8)
    assert (numbers(padded), pad_size) == ([0, 1, 2, 0, 1, 2, 0, 1], 5)
    assert pad_dataproto_to_divisor(numbered(0), 8)[1] == 0


def test_row_lengths_are_sums_of_a_mask() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    batch = DataProto.from_dict({"attention_mask": mask, "bool": mask.bool(), "n": mask[:, 2], "cost": mask / 2})
    assert batch.row_lengths() == [2, 3]
    assert batch.row_lengths("bool") == [2, 3]
    assert batch.row_lengths("n") == [0, 1]
    assert batch.row_lengths("cost") == [1.0, 1.5]
    assert batch[:0].row_lengths() == []


def test_mini_batches_are_in_order_unless_shuffled_and_may_drop_the_last() -> None:
    batch = numbered(5)
    parts = list(batch.make_iterator(2, 1, dataloader_kwargs={"drop_last": True}))
    assert [numbers(part) for part in parts] == [[0, 1], [2, 3]]
    for part in batch.make_iterator(2, 2):
        part.batch["n"] += 100
        part.non_tensor_batch["name"][:] = "changed"
    assert batch == numbered(5)
    orders = {
        tuple(numbers(part)) for seed in range(5) for part in numbered(5).make_iterator(5, 1, seed, {"shuffle": True})
    }
    assert len(orders) > 1
    assert list(numbered(0).make_iterator(2, 2, dataloader_kwargs={"shuffle": True})) == []


def test_items_of_different_shapes_are_not_collated() -> None:
    items = [DataProtoItem(TensorDict({"a": torch.zeros(n)}, [])) for n in (2, 3)]
    with pytest.raises(DataError) as raised:
        collate_fn(items)
    assert raised.value.fields == {"column": "a", "row": 1}
    with pytest.raises(DataError):
        collate_fn([])


def test_items_of_different_columns_are_not_collated() -> None:
    less, more = numbered(1)[0], numbered(1).union(DataProto.from_dict({"m": torch.ones(1)}, {"z": ["x"]}))
    for items, column in (
        ([less, more.select([], "z")[0]], "n"),
        ([more.select([], "z")[0], less], "z"),
        ([less, more.select("n")[0]], "z"),
        ([less, more.select(None, "name")[0]], "m"),
        ([more.select(None, "name")[0], less], "m"),
    ):
        with pytest.raises(DataError) as raised:
            collate_fn(items)
        assert raised.value.fields == {"column": column, "row": 1}


def test_with_tensors_adds_and_replaces_tensors_and_shares_the_rest() -> None:
    batch = numbered(2, a=1)
    changed = batch.with_tensors({"n": torch.tensor([5, 6]), "m": torch.ones(2)})
    assert changed.column_names() == ["n", "m", "name"]
    assert (changed.batch["n"].tolist(), changed.meta_info) == ([5, 6], {"a": 1})
    assert numbers(batch) == [0, 1]
    assert DataProto(meta_info={"a": 1}).with_tensors({"n": torch.ones(3)}).batch["n"].shape == (3,)
    with pytest.raises(DataError) as raised:
        batch.with_tensors({"n": torch.ones(3)})
    assert raised.value.fields == {"columns": ["n"], "actual": (3,), "expected": (2,)}


def test_to_moves_the_batch_itself_and_leaves_batches_that_share_its_tensors() -> None:
    batch = numbered(2)
    other = batch.slice()
    assert batch.to("meta") is batch
    assert batch.batch["n"].device.type == "meta"
    assert batch.non_tensor_batch["name"].tolist() == ["0", "1"]
    assert numbers(other) == [0, 1]
    assert DataProto(meta_info={"a": 1}).to("meta").batch is None


def test_padding_changes_the_batch_itself() -> None:
    batch = numbered(3, a=1)
    assert batch.padding(2) is batch
    assert (numbers(batch), batch.meta_info) == ([0, 1, 2, 2, 2], {"a": 1})


def test_equality_compares_all_of_a_batch_and_reports_the_difference() -> None:
    batch = DataProto.from_dict({"a": torch.tensor([1.0, float("nan")])}, {"u": [{"x": np.arange(2)}, None]}, {"t": 1})
    same = DataProto.from_dict({"a": torch.tensor([1.0, float("nan")])}, {"u": [{"x": np.arange(2)}, None]}, {"t": 1})
    assert batch == same
    assert batch != batch[:1] and batch != "a batch"
    assert batch.difference(batch[:1]) == "2 rows, other has 1"
    assert batch.difference(batch.select([])) == "batch has keys ['a'], other has []"
    assert DataProto(meta_info={"a": 1, 2: 3}).difference(DataProto()) == "meta_info has keys [2, 'a'], other has []"
    for field, key, value in (("batch", "a", torch.tensor([1.0, 2.0])), ("batch", "a", torch.ones(2).double())):
        getattr(same, field)[key] = value
        assert batch.difference(same).startswith("batch['a'] differs")
    same = batch.select()
    same.meta_info["t"] = True + 1
    assert batch.difference(same) == "meta_info['t'] differs: 1 and 2"


def test_the_summary_shows_shapes_and_bytes() -> None:
    batch = DataProto.from_dict(
        {"ids": torch.zeros(8, 16), "j": torch.zeros(8, 3)}, {"uid": list("abcdefgh")}, {"t": 1}
    )
    assert repr(batch) == (
        "DataProto(8 rows, batch {ids: float32[8, 16], j: float32[8, 3]}, non_tensor_batch {uid: object[8]}, "
        "meta_info ['t'], 672 B)"
    )
    assert batch.nbytes() == 672


def test_a_column_added_to_a_batch_or_to_its_copy_is_seen_in_that_one_alone() -> None:
    first = DataProto.from_dict({"a": torch.arange(4)}).slice(0, 3)
    second = copy.copy(first)
    first.batch["b"] = torch.zeros(3)
    second.batch["c"] = torch.ones(3)
    assert set(first.batch.keys()) == {"a", "b"}
    assert set(second.batch.keys()) == {"a", "c"}
    assert first.batch["a"].data_ptr() == second.batch["a"].data_ptr()
    assert DataProto.concat(first.chunk(3)).batch["b"].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "select",
    [
        lambda batch: batch[0],
        lambda batch: batch[0:4],
        lambda batch: batch[[0, 1]],
        lambda batch: batch.chunk(2),
        lambda batch: DataProto.concat([batch, batch]),
        lambda batch: batch.save_to_disk("short"),
    ],
)
def test_an_array_of_another_length_is_rejected_wherever_rows_are_selected(
    select: Callable[[DataProto], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = DataProto.from_dict({"x": torch.zeros(6, 1)})
    batch.non_tensor_batch["y"] = np.array([1, 2])
    with pytest.raises(DataError) as caught:
        select(batch)
    assert (caught.value.column, caught.value.actual, caught.value.rows) == ("y", 2, 6)
