from __future__ import annotations

import pytest
import torch

from mcontroller.errors import DataError
from trainer import BatchStream, collate
from trainer.data.stream import check_rows, in_order


def rows(count: int) -> list[dict]:
    return [{"x": torch.tensor([number, -number]), "name": f"row {number}"} for number in range(count)]


def names(batch) -> list[str]:
    return batch.non_tensor_batch["name"].tolist()


def test_collate_stacks_tensors_and_keeps_other_objects():
    batch = collate(rows(3))
    assert batch.batch["x"].tolist() == [[0, 0], [1, -1], [2, -2]]
    assert names(batch) == ["row 0", "row 1", "row 2"]


@pytest.mark.parametrize("seed", [5, 20261130155900])
def test_every_pass_has_every_row_once_in_a_new_order(seed):
    stream = BatchStream(rows(12), 4, seed)
    passes = [[name for k in range(3) for name in names(stream[3 * number + k])] for number in range(3)]
    assert all(sorted(rows_of_pass) == sorted(f"row {number}" for number in range(12)) for rows_of_pass in passes)
    assert len({tuple(rows_of_pass) for rows_of_pass in passes}) == 3


def test_batch_k_does_not_depend_on_the_batches_taken_before():
    one, other = BatchStream(rows(10), 3, seed=1), BatchStream(rows(10), 3, seed=1)
    in_turn = [names(one[k]) for k in range(9)]
    assert [names(other[k]) for k in (8, 0, 4)] == [in_turn[8], in_turn[0], in_turn[4]]
    assert names(BatchStream(rows(10), 3, seed=2)[0]) != in_turn[0]


def test_a_stream_goes_on_with_the_next_row_after_a_change_of_the_batch_size():
    """Of 10 rows, 8 are read in batches of 4; then the last 2 of the pass, and a new pass, in batches of 2."""
    before = BatchStream(rows(10), 4, seed=1)
    read = [name for k in range(2) for name in names(before[k])]
    after = BatchStream(rows(10), 2, seed=1)
    after.resume(2, before.position(2))
    assert (before.position(2), after.position(3), after.position(8)) == (8, 10, 20)
    assert sorted(read + names(after[2])) == sorted(f"row {number}" for number in range(10))
    whole = BatchStream(rows(10), 2, seed=1)
    assert [names(after[k]) for k in range(3, 13)] == [names(whole[k]) for k in range(5, 15)]


@pytest.mark.parametrize("stopped_at", range(1, 6))
def test_a_stream_that_resumes_with_its_batch_size_is_the_same(stopped_at):
    one, other = BatchStream(rows(10), 3, seed=1), BatchStream(rows(10), 3, seed=1)
    other.resume(stopped_at, one.position(stopped_at))
    later = range(stopped_at, 9)
    assert [names(other[k]) for k in later] == [names(one[k]) for k in later]
    assert [other.position(k) for k in later] == [one.position(k) for k in later]


def test_a_data_set_of_less_than_a_batch_is_rejected_with_both_numbers():
    with pytest.raises(DataError) as caught:
        BatchStream(rows(3), 4, seed=0, name="warm_up_dataset")
    assert (caught.value.rows, caught.value.batch_size) == (3, 4)


def test_in_order_yields_all_rows_once_and_the_rest_as_last_batch():
    assert [names(batch) for batch in in_order(rows(5), 2)] == [["row 0", "row 1"], ["row 2", "row 3"], ["row 4"]]
    assert [len(batch) for batch in in_order(rows(5))] == [5]


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ("a plain string", {"row": 0}),
        ({"question": "1 + 1"}, {"column": "input_ids"}),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, {"column": "input_ids"}),
    ],
)
def test_rows_that_are_no_prompts_are_rejected_with_what_they_are(row, fields):
    prompt = {"input_ids": torch.tensor([1]), "attention_mask": torch.tensor([1])}
    with pytest.raises(DataError) as caught:
        check_rows(train_dataset=[prompt], val_dataset=[row])
    assert caught.value.fields == fields
