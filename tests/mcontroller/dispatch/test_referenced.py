"""A ReferencedBatch is the batch of all its columns, of which a call sends only the columns in the controller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mcontroller.data.protocol import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.referenced import ReferencedBatch, ReferencedShard
from mcontroller.errors import DataError, DispatchError, WorkerError
from mcontroller.partition import split_rows
from mcontroller.worker import Worker
from tests.mcontroller.groups import Echo, group_on, method, received

ROWS = 10


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


def generated(ranks: int = 2, read: Any = (), rows: int = ROWS) -> ReferencedBatch:
    future = method(group_on(ranks, Source), "generate", Dispatch.DP_COMPUTE_PROTO, blocking=False)(numbered(rows))
    return ReferencedBatch.of(future, read)


def whole(rows: int = ROWS) -> DataProto:
    return generated(1, None, rows).columns


def rows_of(batch: DataProto, keep: int | None = None) -> dict[str, list[Any]]:
    return {name: column[:keep].tolist() for name, column in sorted(batch.tensors().items())}


def test_only_the_columns_that_are_read_are_here_and_the_batch_has_all():
    batch = generated(read=("lengths", "absent"))
    assert list(batch.columns.tensors()) == ["lengths"] and len(batch) == ROWS
    assert batch.names == {"responses", "response_mask", "lengths"}
    assert batch.columns.non_tensor_batch["text"].tolist() == [f"text {n}" for n in range(ROWS)]
    assert batch.columns.meta_info == {"rank": 0}
    assert rows_of(batch.here()) == rows_of(whole())
    assert rows_of(batch.read(["responses"]).columns) == rows_of(whole().select(["lengths", "responses"]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [{}, {"padding": "repeat"}, {"balance": "lengths", "padding": "none"}], ids=str)
def test_a_call_gets_the_same_rows_as_with_the_whole_batch(ranks, rows):
    group, expected = group_on(ranks), group_on(ranks)
    added = DataProto.from_dict({"advantages": torch.arange(ROWS) / 3}, meta_info={"n": 2})
    batch = generated(read=("lengths",)).union(added)
    plain = DataProto.from_dict(dict(whole().tensors())).union(added)
    result = method(group, "identity", Dispatch.DP_COMPUTE_PROTO, **rows)(batch)
    method(expected, "identity", Dispatch.DP_COMPUTE_PROTO, **rows)(plain)
    assert [rows_of(got) for got in received(group)] == [rows_of(got) for got in received(expected)]
    assert rows_of(result) == rows_of(plain)
    assert received(group)[0].meta_info["n"] == 2


def test_padding_rows_of_a_call_with_zero_loss_do_not_count_in_the_loss():
    group = group_on(4)
    method(group, "identity", Dispatch.DP_COMPUTE_PROTO, padding="zero_loss")(generated())
    masks = [shard.batch["response_mask"][:, 0].tolist() for shard in received(group)]
    assert [sum(mask) for mask in masks] == [2, 3, 2, 3] and {len(mask) for mask in masks} == {3}


def test_the_arguments_of_a_call_contain_the_columns_that_workers_lack():
    batch = generated(read=("lengths",)).without_text()
    advantages = torch.zeros(ROWS, 1000)
    shards = batch.union(DataProto.from_dict({"advantages": advantages})).split(split_rows(ROWS, 2))
    assert all(isinstance(shard, ReferencedShard) for shard in shards)
    assert [list(shard.here.tensors()) for shard in shards] == [["advantages"]] * 2
    call = method(group_on(2), "identity", Dispatch.DP_COMPUTE_PROTO)
    sent = call.explain(batch.union(DataProto.from_dict({"advantages": advantages}))).sent_bytes
    assert call.explain(batch).sent_bytes < 1000 and sent - call.explain(batch).sent_bytes == advantages.nbytes


def test_selected_and_joined_rows_are_an_index_on_the_workers_columns():
    first, second = generated(2, ("lengths",), 4), generated(3, ("lengths",), ROWS)
    index = torch.tensor([12, 3, 0, 7, 7])
    joined = ReferencedBatch.concat([first, second]).select_idxs(index)
    expected = DataProto.concat([whole(4), whole(ROWS)]).select_idxs(index)
    assert rows_of(joined.here()) == rows_of(expected)
    group = group_on(2)
    method(group, "identity", Dispatch.DP_COMPUTE_PROTO)(joined)
    assert [row for got in received(group) for row in got.batch["responses"].tolist()] == (
        expected.batch["responses"].tolist()
    )


def test_batches_with_other_columns_here_are_joined_here():
    """Such as a batch that was loaded from a file, all of which is here, and one that is on the workers."""
    loaded, kept = ReferencedBatch(whole(4)), generated(2, ("lengths",), ROWS)
    joined = ReferencedBatch.concat([loaded, kept])
    assert joined.references == ()
    assert rows_of(joined.columns) == rows_of(DataProto.concat([whole(4), whole(ROWS)]))


def test_a_column_that_was_replaced_here_is_sent_and_the_old_one_is_not_read():
    batch = generated(read=("response_mask",))
    kept = batch.columns.batch["response_mask"] * torch.tensor([1, 0, 1])
    group = group_on(2)
    method(group, "identity", Dispatch.DP_COMPUTE_PROTO)(batch.with_tensors({"response_mask": kept}))
    assert torch.cat([got.batch["response_mask"] for got in received(group)]).equal(kept)


def test_columns_that_are_left_out_are_neither_held_nor_read_nor_fetched():
    batch = generated(read=("responses",)).union(DataProto.from_dict({"scores": torch.ones(ROWS)}))
    less = batch.without(["responses", "scores", "absent"])
    assert less.names == {"response_mask", "lengths"} and list(less.columns.tensors()) == []
    assert rows_of(less.here()) == rows_of(whole().select(["response_mask", "lengths"]))
    assert batch.without(less.names | {"responses"}).references == ()


def test_columns_of_several_calls_are_united():
    source, scorer = generated(2), group_on(3, Source)
    more = method(scorer, "generate", Dispatch.DP_COMPUTE_PROTO, blocking=False)(numbered())
    group = group_on(2)
    united = source.union(ReferencedBatch.of(more, ()).without_text())
    result = method(group, "identity", Dispatch.DP_COMPUTE_PROTO)(united)
    assert rows_of(result) == rows_of(whole())
    with pytest.raises(DataError, match="union of 10 rows with 4 rows"):
        source.union(generated(rows=4))


def test_a_rank_may_write_into_what_it_gets():
    class Writes(Echo):
        def identity(self, batch: DataProto, *others: Any, **more: Any) -> DataProto:
            batch.batch["advantages"].zero_()
            batch.batch["responses"].zero_()
            return batch

    batch = generated().union(DataProto.from_dict({"advantages": torch.ones(ROWS)}))
    method(group_on(2, Writes), "identity", Dispatch.DP_COMPUTE_PROTO)(batch)
    assert batch.columns.batch["advantages"].sum() == ROWS
    assert rows_of(batch.here().select(["responses"])) == rows_of(whole().select(["responses"]))


def test_a_method_that_gets_its_arguments_whole_gets_all_columns():
    values = method(group_on(2), "rank_and_arguments", Dispatch.ONE_TO_ALL)(generated())
    assert [rows_of(args[0]) for _, args, _ in values] == [rows_of(whole())] * 2


def test_the_failure_of_a_call_is_raised_when_its_result_is_referenced():
    future = method(group_on(2, Source), "fails", Dispatch.DP_COMPUTE_PROTO, blocking=False)(numbered())
    with pytest.raises(WorkerError, match="no rows"):
        ReferencedBatch.of(future)


def test_a_batch_without_the_column_that_balances_is_rejected_and_not_sent():
    call = method(group_on(2), "identity", Dispatch.DP_COMPUTE_PROTO, balance="tokens")
    with pytest.raises(DispatchError, match="rows are split by column 'tokens', which no batch of the call has"):
        call(generated())


def test_a_value_that_is_not_kept_on_workers_is_here():
    batch = ReferencedBatch.of(numbered())
    assert batch.references == () and np.array_equal(batch.here().batch["n"], np.arange(ROWS))
