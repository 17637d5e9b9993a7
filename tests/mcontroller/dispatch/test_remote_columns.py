"""A batch whose tensors are on workers is the batch of all its columns, of which a call sends those that are here."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.errors import DataError, DispatchError, WorkerError
from mcontroller.worker import Worker
from tests.mcontroller.groups import Echo, group_on, method, received

ROWS = 10
NAMES = {"responses", "response_mask", "lengths"}


class Source(Worker):
    def generate(self, batch: DataProto) -> DataProto:
        numbers = batch.batch["n"]  # type: ignore[index]
        columns = {
            "responses": numbers[:, None] * 10 + torch.arange(3),
            "response_mask": torch.ones(len(numbers), 3, dtype=torch.long),
            "lengths": numbers % 4 + 1,
        }
        return DataProto.from_dict(columns, {"text": [f"text {n}" for n in numbers.tolist()]}, {"rank": self.rank})

    def fails(self, batch: DataProto) -> DataProto:
        raise ValueError("no rows")


def numbered(rows: int = ROWS) -> DataProto:
    return DataProto.from_dict({"n": torch.arange(rows)})


def generated(ranks: int = 2, rows: int = ROWS, name: str = "generate") -> DataProto:
    return method(group_on(ranks, Source), name, Dispatch.DP_COMPUTE_PROTO, blocking=False)(numbered(rows))


def whole(rows: int = ROWS) -> DataProto:
    return method(group_on(1, Source), "generate", Dispatch.DP_COMPUTE_PROTO)(numbered(rows))


def rows_of(batch: DataProto, keep: int | None = None) -> dict[str, list[Any]]:
    return {name: column[:keep].tolist() for name, column in sorted(batch.tensors().items())}


def test_only_the_tensors_that_are_read_are_here_and_the_batch_has_all():
    batch = generated()
    assert len(batch) == ROWS and set(batch.tensor_names) == NAMES and batch.local_tensors() == {}
    assert batch.non_tensor_batch["text"].tolist() == [f"text {n}" for n in range(ROWS)]
    assert batch.meta_info == {"rank": 0}
    assert batch.tensors(["lengths"])["lengths"].tolist() == rows_of(whole())["lengths"]
    assert list(batch.local_tensors()) == ["lengths"] and batch.remote_names == NAMES
    assert rows_of(batch) == rows_of(whole())
    with pytest.raises(DataError) as raised:
        batch.tensors(["absent"])
    assert raised.value.missing == ["absent"]


def test_the_tensordict_has_all_tensors_and_none_is_on_workers_then():
    batch = generated()
    batch.batch["lengths"][:] = 7
    assert batch.remote == () and set(batch.batch.keys()) == NAMES
    group = group_on(2)
    method(group, "identity", Dispatch.DP_COMPUTE_PROTO)(batch)
    assert {value for shard in received(group) for value in shard.batch["lengths"].tolist()} == {7}


@pytest.mark.parametrize("change", [lambda b: b.get(), copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_a_copy_and_what_get_returns_have_all_columns_here(change):
    changed = change(generated())
    assert changed.remote == () and changed.difference(whole()) is None


def test_a_batch_with_tensors_on_workers_is_saved_whole(tmp_path: Path):
    generated().save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch") == whole()


@pytest.mark.parametrize(
    "operation",
    [
        lambda b: b.slice(2, 9, 3),
        lambda b: b.select_idxs([7, 0, 0, 3]),
        lambda b: b[np.arange(ROWS) % 2 == 0],
        lambda b: b.repeat(2),
        lambda b: b.chunk(3)[1],
        lambda b: b.split(4)[2],
        lambda b: DataProto.concat(b.chunk(4)[::-1]),
        lambda b: b.padding(3),
        lambda b: b.slice(3, 3),
        lambda b: b.select(["lengths"]),
        lambda b: b.select([], []),
        lambda b: b.pop(["lengths"], ["text"]),
        lambda b: b.rename("lengths", "sizes"),
        lambda b: b.with_tensors({"lengths": torch.zeros(ROWS)}),
        lambda b: b.union(numbered()),
        lambda b: next(b.make_iterator(4, 1)),
    ],
)
def test_an_operation_returns_what_it_returns_for_columns_that_are_here(operation):
    remote, local = operation(generated()), operation(whole())
    assert len(remote) == len(local) and sorted(remote.column_names()) == sorted(local.column_names())
    assert remote.difference(local) is None


def test_selected_and_renamed_rows_are_not_fetched():
    batch = generated().select_idxs([4, 1]).select(["lengths", "responses"]).rename("lengths", "sizes")
    assert batch.local_tensors() == {} and batch.tensors(["sizes"])["sizes"].tolist() == [1, 2]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [{}, {"padding": "repeat"}, {"balance": "lengths", "padding": "none"}], ids=str)
def test_a_call_gets_the_same_rows_as_with_the_whole_batch(ranks, rows):
    group, expected = group_on(ranks), group_on(ranks)
    added = DataProto.from_dict({"advantages": torch.arange(ROWS) / 3}, meta_info={"n": 2})
    batch = generated().prefetch(["lengths"]).union(added)
    result = method(group, "identity", Dispatch.DP_COMPUTE_PROTO, **rows)(batch)
    method(expected, "identity", Dispatch.DP_COMPUTE_PROTO, **rows)(whole().union(added))
    assert received(group) == received(expected)
    assert rows_of(result) == rows_of(whole().union(added))


def test_padding_rows_of_a_call_with_zero_loss_do_not_count_in_the_loss():
    group = group_on(4)
    method(group, "identity", Dispatch.DP_COMPUTE_PROTO, padding="zero_loss")(generated())
    masks = [shard.batch["response_mask"][:, 0].tolist() for shard in received(group)]
    assert [sum(mask) for mask in masks] == [2, 3, 2, 3] and {len(mask) for mask in masks} == {3}


def test_a_call_sends_the_tensors_that_workers_lack():
    batch = generated().prefetch(["lengths"]).select(non_tensor_batch_keys=[])
    advantages = DataProto.from_dict({"advantages": torch.zeros(ROWS, 1000)})
    call = method(group_on(2), "identity", Dispatch.DP_COMPUTE_PROTO)
    alone, sent = call.explain(batch).sent_bytes, call.explain(batch.union(advantages)).sent_bytes
    assert alone < 1000 and sent - alone == advantages.nbytes()


def test_joined_rows_of_several_calls_are_an_index_on_the_workers_columns():
    index = torch.tensor([12, 3, 0, 7, 7])
    first, second = generated(2, 4).prefetch(["lengths"]), generated(3)
    joined = DataProto.concat([first, second]).select_idxs(index)
    assert joined.local_tensors() == {}
    expected = DataProto.concat([whole(4), whole()]).select_idxs(index)
    group = group_on(2)
    method(group, "identity", Dispatch.DP_COMPUTE_PROTO)(joined)
    assert [row for shard in received(group) for row in shard.batch["responses"].tolist()] == (
        expected.batch["responses"].tolist()
    )
    assert joined == expected


def test_batches_with_other_tensors_on_workers_are_joined_here():
    """Such as a batch that was loaded from a file, all of which is here, and one that is on the workers."""
    joined = DataProto.concat([whole(4), generated()])
    assert joined.remote == () and joined == DataProto.concat([whole(4), whole()])


def test_a_column_that_was_replaced_is_sent_and_the_old_one_is_not_read():
    batch = generated()
    kept = batch.tensors(["response_mask"])["response_mask"] * torch.tensor([1, 0, 1])
    group = group_on(2)
    method(group, "identity", Dispatch.DP_COMPUTE_PROTO)(batch.with_tensors({"response_mask": kept}))
    assert torch.cat([shard.batch["response_mask"] for shard in received(group)]).equal(kept)


def test_columns_of_several_calls_are_united():
    group, united = group_on(2), generated(2).union(generated(3).select(non_tensor_batch_keys=[]))
    assert rows_of(method(group, "identity", Dispatch.DP_COMPUTE_PROTO)(united)) == rows_of(whole())
    with pytest.raises(DataError) as raised:
        generated().union(generated(rows=4))
    assert raised.value.rows == (10, 4)


def test_a_column_of_two_calls_must_have_the_same_values():
    same = generated()
    assert same.union(same).local_tensors() == {}
    other = DataProto.from_dict({"lengths": torch.zeros(ROWS, dtype=torch.long)})
    reversed_rows = generated().select_idxs(np.arange(ROWS)[::-1])
    for left, right in ((generated().select(["lengths"], []), reversed_rows), (generated(), other)):
        with pytest.raises(DataError) as raised:
            left.union(right)
        assert raised.value.column == "lengths"


def test_a_rank_may_write_into_what_it_gets():
    class Writes(Echo):
        def identity(self, batch: DataProto, *others: Any, **more: Any) -> DataProto:
            batch.batch["advantages"].zero_()
            batch.batch["responses"].zero_()
            return batch

    batch = generated().union(DataProto.from_dict({"advantages": torch.ones(ROWS)}))
    method(group_on(2, Writes), "identity", Dispatch.DP_COMPUTE_PROTO)(batch)
    assert batch.tensors(["advantages"])["advantages"].sum() == ROWS
    assert batch.tensors(["responses"])["responses"].tolist() == rows_of(whole())["responses"]


def test_a_method_that_gets_its_arguments_whole_gets_all_columns():
    values = method(group_on(2), "rank_and_arguments", Dispatch.ONE_TO_ALL)(generated())
    assert [args[0] for _, args, _ in values] == [whole()] * 2


def test_the_failure_of_a_call_is_raised_when_its_result_is_read():
    failed = generated(name="fails")
    for read in (len, lambda batch: batch.meta_info, lambda batch: batch.batch, lambda batch: batch.get()):
        with pytest.raises(WorkerError) as raised:
            read(failed)
        assert "no rows" in raised.value.cause


def test_a_batch_without_the_column_that_balances_is_rejected_and_not_sent():
    call = method(group_on(2), "identity", Dispatch.DP_COMPUTE_PROTO, balance="tokens")
    with pytest.raises(DispatchError) as raised:
        call(generated())
    assert raised.value.column == "tokens"


def test_a_field_that_was_set_before_the_batch_was_read_stays_set():
    batch = generated()
    batch.meta_info = {"epoch": 3}
    assert len(batch) == ROWS and batch.meta_info == {"epoch": 3}


def test_a_batch_that_is_here_has_been_computed():
    batch = numbered()
    assert batch.done() and batch.wait(0) and batch.get() is batch and batch.prefetch() is batch
