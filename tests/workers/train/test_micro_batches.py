"""Micro-batches of so many rows or so many tokens: every row once, within the bound, as many as asked for."""

from __future__ import annotations

import pytest
import torch

from workers.train.batches import TokenBatch
from workers.train.micro_batches import (
    equal_micro_batches,
    least_count,
    packed_equal_micro_batches,
    token_micro_batches,
)


def rows_of(*lengths: int) -> TokenBatch:
    """Row i holds the token i + 1, in as many columns as it is long."""
    columns = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    tokens = columns * torch.arange(1, len(lengths) + 1)[:, None]
    predictors = torch.full_like(tokens, max(lengths) - 1)
    return TokenBatch(tokens, tokens, predictors, columns.float(), torch.tensor(lengths))


def test_micro_batches_are_of_one_size_and_their_filling_does_not_count() -> None:
    rows = rows_of(4, 4, 4, 4, 4, 4)
    batches = equal_micro_batches(rows, torch.tensor([4, 1, 5, 0]), most=5, micro_batch_size=4)
    assert [len(batch.rows) for batch in batches] == [3, 3]
    assert [batch.index.tolist() for batch in batches] == [[4, 1, 5], [0]]
    assert torch.equal(batches[0].rows.tokens, rows.tokens[[4, 1, 5]])
    assert batches[1].rows.mask.sum() == 4
    assert len(equal_micro_batches(rows, torch.arange(5), most=5, micro_batch_size=4, multiple=4)) == 4


@pytest.mark.parametrize("count", [3, 4, 9])
def test_every_row_is_once_in_a_micro_batch_within_the_budget(count: int) -> None:
    rows = rows_of(7, 2, 9, 3, 3, 8, 1, 5)
    index = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    batches = token_micro_batches(rows, index, count, 20)
    assert len(batches) == count
    assert sorted(row for batch in batches for row in batch.index.tolist()) == index.tolist()
    for batch in batches:
        valid = len(batch.index)
        assert batch.rows.tokens.numel() <= 20
        assert batch.rows.tokens.size(1) == batch.rows.lengths.max()
        assert torch.equal(batch.rows.tokens[:valid], rows.tokens[batch.index, : batch.rows.tokens.size(1)])
        assert batch.rows.predictors.max() < batch.rows.tokens.size(1)
        assert batch.rows.mask[valid:].sum() == 0
        assert (batch.rows.mask[:valid].sum(1) == rows.lengths[batch.index]).all()


def test_the_least_number_of_micro_batches_puts_rows_of_similar_length_together() -> None:
    lengths = [10, 1, 10, 1, 1, 1, 1, 1]
    assert least_count(torch.tensor(lengths), 20) == 2
    batches = token_micro_batches(rows_of(*lengths), torch.arange(8), 2, 20)
    assert [batch.index.tolist() for batch in batches] == [[0, 2], [1, 3, 4, 5, 6, 7]]
    assert sum(batch.rows.tokens.numel() for batch in batches) == sum(lengths)


def test_more_micro_batches_than_the_least_are_evenly_filled() -> None:
    batches = token_micro_batches(rows_of(*[4] * 12), torch.arange(12), 4, 40)
    assert [len(batch.index) for batch in batches] == [3, 3, 3, 3]


def test_a_row_longer_than_the_budget_goes_alone_and_no_rows_still_make_a_micro_batch() -> None:
    rows = rows_of(9, 2, 2)
    assert [batch.index.tolist() for batch in token_micro_batches(rows, torch.arange(3), 2, 4)] == [[0], [1, 2]]
    assert least_count(rows.lengths[:0], 4) == 1
    (nothing,) = token_micro_batches(rows, torch.arange(0), 1, 4)
    assert (nothing.index.tolist(), nothing.rows.tokens.shape, float(nothing.rows.mask.sum())) == ([], (1, 2), 0.0)


def test_widths_are_multiples_of_what_the_axes_divide() -> None:
    assert least_count(torch.tensor([5, 5]), 10, length_multiple=4) == 2
    (batch,) = token_micro_batches(rows_of(5, 3, 8), torch.tensor([0, 1]), 1, 16, length_multiple=4)
    assert batch.rows.tokens.shape == (2, 8)


@pytest.mark.parametrize("count", [3, 5, 9])
def test_packed_micro_batches_cost_the_tokens_of_their_rows(count: int) -> None:
    rows = rows_of(19, 2, 9, 3, 3, 8, 1, 5)
    index = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    assert least_count(rows.lengths[index], 20, packed=True) == 3
    batches = token_micro_batches(rows, index, count, 20, packed=True)
    assert len(batches) == count
    assert sorted(row for batch in batches for row in batch.index.tolist()) == index.tolist()
    for batch in batches:
        assert batch.rows.packing is not None
        assert batch.rows.packing.total == rows.lengths[batch.index].sum() or len(batch.index) == 0
        assert batch.rows.packing.total <= 20
        assert batch.rows.mask.sum() == rows.lengths[batch.index].sum()


def test_long_and_short_rows_share_a_packed_micro_batch_that_padding_would_split() -> None:
    lengths = [30, 30, *[5] * 8]
    assert least_count(torch.tensor(lengths), 50) == 3
    assert least_count(torch.tensor(lengths), 50, packed=True) == 2
    batches = token_micro_batches(rows_of(*lengths), torch.arange(10), 2, 50, packed=True)
    assert [batch.rows.input_shape for batch in batches] == [(1, 50), (1, 50)]


def test_a_row_longer_than_the_budget_does_not_let_others_over_it() -> None:
    rows = rows_of(50, 6, 6, 6, 6)
    batches = token_micro_batches(rows, torch.arange(5), 3, 12, packed=True)
    assert [batch.index.tolist() for batch in batches] == [[0], [1, 2], [3, 4]]


def test_packed_micro_batches_of_so_many_rows_have_no_filling() -> None:
    rows = rows_of(6, 1, 4, 5)
    batches = packed_equal_micro_batches(rows, torch.tensor([0, 2, 3]), 4, 2, multiple=3, length_multiple=4)
    assert [batch.index.tolist() for batch in batches] == [[0, 2], [3], []]
    assert [batch.rows.input_shape for batch in batches] == [(1, 12), (1, 8), (1, 4)]
    assert float(batches[2].rows.mask.sum()) == 0.0
