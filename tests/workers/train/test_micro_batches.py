"""Micro-batches by rows or by tokens have every row once, stay within the budget, and are as many as requested."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workers.config.roles import MicroBatchSize
from workers.train.batches import TokenBatch
from workers.train.micro_batches import MicroBatch, MicroBatcher

CPU: Any = {"pg": None, "device": torch.device("cpu"), "count_multiple": 1, "length_multiple": 1}


def divided(
    batch: TokenBatch, index: Any, *, tokens: int = 0, rows: int = 0, most: int = 0, others: int = 0, **fields: Any
) -> list[MicroBatch]:
    """Divide rows on one data-parallel rank; ``others`` is what the other rank needs under a budget of tokens."""

    class Batcher(MicroBatcher):
        def gather(self, number: int) -> list[int]:
            return [number, others]

    size = MicroBatchSize(rows=rows, tokens=tokens)
    return Batcher(**{**CPU, **fields}).divide(batch, torch.as_tensor(index, dtype=torch.long), most, size)


def batch_of(*lengths: int) -> TokenBatch:
    """Row i consists of ``lengths[i]`` tokens i + 1."""
    columns = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    tokens = columns * torch.arange(1, len(lengths) + 1)[:, None]
    predictors = torch.full_like(tokens, max(lengths) - 1)
    return TokenBatch(tokens, tokens, predictors, columns.float(), torch.tensor(lengths))


def test_equal_micro_batches_have_one_size_and_their_filling_does_not_count() -> None:
    batch = batch_of(4, 4, 4, 4, 4, 4)
    batches = divided(batch, [4, 1, 5, 0], most=5, rows=4)
    assert [len(part.batch) for part in batches] == [3, 3]
    assert [part.index.tolist() for part in batches] == [[4, 1, 5], [0]]
    assert torch.equal(batches[0].batch.tokens, batch.tokens[[4, 1, 5]])
    assert batches[1].batch.mask.sum() == 4
    assert len(divided(batch, range(5), most=5, rows=4, count_multiple=4)) == 4


@pytest.mark.parametrize("count", [3, 4, 9])
def test_every_row_is_in_one_micro_batch_within_the_budget(count: int) -> None:
    batch = batch_of(7, 2, 9, 3, 3, 8, 1, 5)
    index = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    batches = divided(batch, index, tokens=20, others=count)
    assert len(batches) == count
    assert sorted(row for part in batches for row in part.index.tolist()) == index.tolist()
    for part in batches:
        valid = len(part.index)
        assert part.batch.tokens.numel() <= 20
        assert part.batch.tokens.size(1) == part.batch.lengths.max()
        assert torch.equal(part.batch.tokens[:valid], batch.tokens[part.index, : part.batch.tokens.size(1)])
        assert part.batch.predictors.max() < part.batch.tokens.size(1)
        assert part.batch.mask[valid:].sum() == 0
        assert (part.batch.mask[:valid].sum(1) == batch.lengths[part.index]).all()


def test_least_number_of_micro_batches_groups_rows_of_similar_length() -> None:
    lengths = [10, 1, 10, 1, 1, 1, 1, 1]
    batches = divided(batch_of(*lengths), range(8), tokens=20)
    assert [part.index.tolist() for part in batches] == [[0, 2], [1, 3, 4, 5, 6, 7]]
    assert sum(part.batch.tokens.numel() for part in batches) == sum(lengths)


def test_more_micro_batches_than_the_least_are_filled_evenly() -> None:
    batches = divided(batch_of(*[4] * 12), range(12), tokens=40, others=4)
    assert [len(part.index) for part in batches] == [3, 3, 3, 3]


def test_row_longer_than_the_budget_is_alone_and_no_rows_make_one_micro_batch() -> None:
    batch = batch_of(9, 2, 2)
    assert [part.index.tolist() for part in divided(batch, range(3), tokens=4)] == [[0], [1, 2]]
    (nothing,) = divided(batch, [], tokens=4)
    assert (nothing.index.tolist(), nothing.batch.tokens.shape, float(nothing.batch.mask.sum())) == ([], (1, 2), 0.0)


def test_budgets_of_tokens_have_few_widths_on_a_gpu() -> None:
    lengths = list(range(40, 640, 7))
    batch = batch_of(*lengths)
    actual = {}
    for device in ("cpu", "cuda"):
        on_device = {"device": torch.device(device), "length_multiple": 4}
        batches = divided(batch, range(len(lengths)), tokens=2048, **on_device)
        assert all(part.batch.tokens.numel() <= 2048 for part in batches)
        actual[device] = {part.batch.tokens.size(1) for part in batches}
    assert actual["cuda"] == {128, 256, 384, 512, batch.tokens.size(1)}
    assert len(actual["cpu"]) > 12


def test_widths_are_rounded_up_to_the_multiple() -> None:
    assert len(divided(batch_of(5, 5, 8), [0, 1], tokens=10, length_multiple=4)) == 2
    (part,) = divided(batch_of(5, 3, 8), [0, 1], tokens=16, length_multiple=4)
    assert part.batch.tokens.shape == (2, 8)


@pytest.mark.parametrize("count", [3, 5, 9])
def test_packed_micro_batches_cost_the_sum_of_their_lengths(count: int) -> None:
    batch = batch_of(19, 2, 9, 3, 3, 8, 1, 5)
    index = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    assert len(divided(batch, index, tokens=20, packed=True)) == 3
    batches = divided(batch, index, tokens=20, others=count, packed=True)
    assert len(batches) == count
    assert sorted(row for part in batches for row in part.index.tolist()) == index.tolist()
    for part in batches:
        assert part.batch.packing is not None
        assert part.batch.packing.total == batch.lengths[part.index].sum() or len(part.index) == 0
        assert part.batch.packing.total <= 20
        assert part.batch.mask.sum() == batch.lengths[part.index].sum()


def test_packed_micro_batch_combines_rows_that_padding_would_separate() -> None:
    lengths = [30, 30, *[5] * 8]
    assert len(divided(batch_of(*lengths), range(10), tokens=50)) == 3
    batches = divided(batch_of(*lengths), range(10), tokens=50, packed=True)
    assert [part.batch.input_shape for part in batches] == [(1, 50), (1, 50)]


def test_row_longer_than_the_budget_does_not_raise_it_for_others() -> None:
    batch = batch_of(50, 6, 6, 6, 6)
    batches = divided(batch, range(5), tokens=12, packed=True)
    assert [part.index.tolist() for part in batches] == [[0], [1, 2], [3, 4]]


def test_packed_micro_batches_by_rows_have_no_filling() -> None:
    batch = batch_of(6, 1, 4, 5)
    batches = divided(batch, [0, 2, 3], most=4, rows=2, count_multiple=3, length_multiple=4, packed=True)
    assert [part.index.tolist() for part in batches] == [[0, 2], [3], []]
    assert [part.batch.input_shape for part in batches] == [(1, 12), (1, 8), (1, 4)]
    assert float(batches[2].batch.mask.sum()) == 0.0
