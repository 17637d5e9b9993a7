"""Rows are shifted to the left edge, and mini-batches are the same for any number of data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mcontroller.errors import DataError
from workers.train.batches import response_batch, supervised_batch
from workers.train.mini_batches import checked, draw_mini_batches, mini_batch_rows

TWO_ROWS = {
    "input_ids": torch.tensor([[0, 5, 6, 7, 8, 0], [2, 3, 4, 9, 0, 0]]),
    "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]),
    "responses": torch.tensor([[7, 8, 0], [9, 0, 0]]),
}
LIMITS = {"method": "update", "vocab_size": 10, "max_length": 8}


def test_rows_start_at_column_0_and_are_as_wide_as_the_longest() -> None:
    batch = response_batch(TWO_ROWS, **LIMITS)
    assert batch.tokens.tolist() == [[5, 6, 7, 8], [2, 3, 4, 9]]
    assert batch.mask.tolist() == [[1, 1, 0], [1, 0, 0]]


def test_every_response_token_is_predicted_from_the_one_before_it() -> None:
    batch = response_batch(TWO_ROWS, **LIMITS)
    for row, column in batch.mask.nonzero().tolist():
        following = batch.tokens[row, batch.predictors[row, column] + 1]
        assert following == batch.targets[row, column]


def test_sequence_length_is_rounded_up_to_the_multiple() -> None:
    assert response_batch(TWO_ROWS, **LIMITS, multiple=8).tokens.tolist()[0] == [5, 6, 7, 8, 0, 0, 0, 0]


def test_supervised_targets_are_the_tokens_with_a_loss_mask_of_1() -> None:
    mask = torch.tensor([[0, 0, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0]])
    batch = supervised_batch(TWO_ROWS | {"loss_mask": mask}, **LIMITS)
    targets = [batch.targets[row][batch.mask[row] == 1].tolist() for row in range(2)]
    assert targets == [[6, 8], [3, 4, 9]]
    assert (batch.tokens.gather(1, batch.predictors + 1) == batch.targets).all()


def mini_batches_of(total: int, shards: int, shuffled: bool, epochs: int = 1) -> list[list[int]]:
    """Return the rows of each mini-batch of 4 rows, over consecutive shards of a batch."""
    numbers = draw_mini_batches(total, 4, epochs, torch.Generator().manual_seed(1) if shuffled else None)
    count, gathered = -(-total // 4), []
    for mine in numbers.tensor_split(shards):
        mini_batch_rows(mine, count, lambda local: gathered.append(list(local)) or [list(local)])
    batches: list[list[int]] = [[] for _ in range(count * epochs)]
    first = 0
    for mine in numbers.tensor_split(shards):
        for number, (index, most, rows) in enumerate(mini_batch_rows(mine, count, lambda local: gathered)):
            batches[number] += (index + first).tolist()
            assert len(index) <= most <= rows == int((numbers[:, number // count] == number % count).sum())
        first += len(mine)
    return batches


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("total", [1, 7, 16, 37])
def test_mini_batches_do_not_depend_on_the_number_of_data_parallel_ranks(total: int, shuffled: bool) -> None:
    whole = mini_batches_of(total, 1, shuffled)
    assert sorted(row for batch in whole for row in batch) == list(range(total))
    assert all(len(batch) <= 4 for batch in whole)
    for shards in (2, 3, 4):
        assert mini_batches_of(total, shards, shuffled) == whole


def test_equal_shards_have_equally_many_rows_of_every_mini_batch() -> None:
    rows = draw_mini_batches(16, 8, 1, torch.Generator().manual_seed(1))
    assert [torch.bincount(shard.flatten()).tolist() for shard in rows.split(8)] == [[4, 4], [4, 4]]


def test_shuffled_mini_batches_differ_in_every_epoch() -> None:
    first, second = draw_mini_batches(64, 8, 2, torch.Generator().manual_seed(1)).unbind(1)
    assert not torch.equal(first, second)


def test_mini_batches_that_do_not_fit_the_update_are_rejected() -> None:
    def alone(numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers)]

    with pytest.raises(DataError) as caught:
        mini_batch_rows(torch.tensor([[0], [-1], [1], [2]]), 2, alone)
    assert caught.value.column == "mini_batches"
    with pytest.raises(DataError) as caught:
        checked(torch.zeros(3), (3, 2))
    assert caught.value.column == "mini_batches"


def test_invalid_batch_is_rejected_with_its_row_and_column() -> None:
    def rejection(**changes: torch.Tensor) -> dict[str, Any]:
        with pytest.raises(DataError) as caught:
            response_batch({**TWO_ROWS, **changes}, ["advantages"], **LIMITS)
        return {name: value for name, value in caught.value.fields.items() if name not in ("method", "present")}

    advantages = torch.zeros(2, 3)
    padding_only = TWO_ROWS["attention_mask"] * torch.tensor([[1], [0]])
    gap = torch.tensor([[0, 1, 0, 1, 1, 0], [1, 1, 1, 1, 0, 0]])
    outside = TWO_ROWS["input_ids"] + 3 * TWO_ROWS["attention_mask"] * torch.tensor([[0], [1]])
    other_responses = torch.tensor([[7, 8, 0], [8, 0, 0]])
    mask_of_padding = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert rejection() == {"missing": ["advantages"]}
    assert rejection(advantages=advantages, attention_mask=padding_only) == {"row": 1, "length": 0, "rows": [1]}
    assert rejection(advantages=advantages, attention_mask=gap) == {"row": 0, "length": 3, "rows": [0]}
    assert rejection(advantages=advantages, input_ids=outside) == {"row": 1, "token": 12}
    assert rejection(advantages=advantages, responses=other_responses) == {"column": "responses", "row": 1}
    assert rejection(advantages=advantages, response_mask=mask_of_padding) == {"column": "response_mask", "row": 0}
    for name in ("input_ids", "responses"):
        fractions = rejection(advantages=advantages, **{name: TWO_ROWS[name].float()})
        assert fractions == {"column": name, "dtype": "torch.float32"}
    assert rejection(advantages=advantages, input_ids=TWO_ROWS["input_ids"][:, 0])["column"] == "input_ids"
    assert rejection(advantages=torch.zeros(2, 2))["column"] == "advantages"
    infinite = torch.tensor([[0.0, 0.0, 0.0], [torch.inf, 0.0, 0.0]])
    assert rejection(advantages=infinite) == {"column": "advantages", "row": 1, "value": torch.inf}
    empty = {"responses": TWO_ROWS["responses"][:, :0], "advantages": advantages[:, :0]}
    assert rejection(**empty) == {"columns": ["input_ids", "responses"]}
    with pytest.raises(DataError) as caught:
        response_batch(TWO_ROWS, **(LIMITS | {"max_length": 3}))
    assert (caught.value.method, caught.value.row, caught.value.length) == ("update", 0, 4)
    with pytest.raises(DataError) as caught:
        supervised_batch(TWO_ROWS | {"loss_mask": torch.ones(2, 6)}, **LIMITS)
    assert (caught.value.column, caught.value.method) == ("loss_mask", "update")


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, float("nan")])
def test_mask_with_values_other_than_0_and_1_is_rejected(value: float) -> None:
    """The loss is divided by the sum of the mask, which would not be a number of tokens."""
    attention, ending = TWO_ROWS["attention_mask"].float(), torch.tensor([[0.0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    for read, column, mask in (
        (response_batch, "attention_mask", attention.masked_fill(ending != 0, value)),
        (response_batch, "response_mask", torch.tensor([[value, 0.0, 0.0], [1.0, 0.0, 0.0]])),
        (supervised_batch, "loss_mask", ending * value),
    ):
        with pytest.raises(DataError) as caught:
            read(TWO_ROWS | {column: mask}, **LIMITS)
        assert (caught.value.column, caught.value.row) == (column, 0)
        assert caught.value.value == pytest.approx(value, nan_ok=True)
