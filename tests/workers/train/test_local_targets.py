"""The targets that go through the output layer: the ones that count, each on one context-parallel rank."""

from __future__ import annotations

import pytest
import torch

from workers.train.batches import TokenBatch
from workers.train.packing import locate_local_targets, packing_of
from workers.zigzag import zigzag_slice

LENGTHS = torch.tensor([16, 5, 11])
TOKENS = torch.arange(3 * 16).view(3, 16) * (torch.arange(16) < LENGTHS[:, None])
PREDICTORS = torch.arange(15).expand(3, -1)
MASK = ((LENGTHS[:, None] > PREDICTORS + 1) & (PREDICTORS % 3 > 0)).float()


def batch(packed: bool, cp: int) -> TokenBatch:
    packing = packing_of(LENGTHS, 2 * cp) if packed else None
    return TokenBatch(TOKENS, TOKENS[:, 1:], PREDICTORS, MASK, LENGTHS, packing=packing)


def model_input(rows: TokenBatch, cp: int, rank: int) -> torch.Tensor:
    """The tokens that a rank's model gets, ``[sequences, seq]``."""
    if rows.packing is None:
        return zigzag_slice(rows.tokens, cp, rank)
    return rows.tokens[rows.packing.tokens_of_rank(cp, rank)][None]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_each_target_that_counts_is_on_one_rank_next_to_its_predictor(cp: int, packed: bool) -> None:
    rows = batch(packed, cp)
    indices = []
    for rank in range(cp):
        local = rows.for_rank(cp, rank).local
        assert local is not None
        predicted_by = model_input(rows, cp, rank).t().flatten()[local.predictors]
        assert torch.equal(predicted_by, TOKENS[:, :-1].flatten()[local.index])
        indices += local.index.tolist() * (not local.empty)
    assert sorted(indices) == MASK.flatten().nonzero().flatten().tolist()


def test_scattered_values_are_at_their_targets_and_0_elsewhere() -> None:
    local = batch(False, 1).for_rank(1, 0).local
    assert local is not None
    column = torch.arange(1.0, MASK.numel() + 1)
    values = torch.stack((column, -column))[:, local.index].requires_grad_()
    whole = local.scatter(values, MASK.shape)
    assert torch.equal(whole[0], column.view_as(MASK) * MASK)
    assert torch.equal(whole[1], -whole[0])
    whole.sum().backward()
    assert values.grad is not None and bool((values.grad == 1).all())


def test_rank_without_targets_keeps_one_whose_result_is_0() -> None:
    local = locate_local_targets(torch.zeros(2, 3), torch.zeros(2, 3).long(), 4, None, cp=1, rank=0)
    values = torch.tensor([5.0], requires_grad=True)
    assert local.empty and local.index.tolist() == local.predictors.tolist() == [0]
    assert local.scatter(values, torch.Size((2, 3))).tolist() == [[0.0] * 3] * 2
