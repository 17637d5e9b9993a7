"""Sequences divided over the cp axis in zigzag, and put together again."""

from __future__ import annotations

import pytest
import torch

from workers.zigzag import zigzag_join, zigzag_positions, zigzag_slice


def test_a_rank_has_one_piece_from_the_front_and_one_from_the_back() -> None:
    assert [zigzag_positions(8, 2, rank).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert zigzag_positions(5, 1, 0).tolist() == [0, 1, 2, 3, 4]


def test_causal_attention_costs_every_rank_the_same() -> None:
    costs = [int((zigzag_positions(24, 3, rank) + 1).sum()) for rank in range(3)]
    assert costs == [100, 100, 100]


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_join_undoes_slice(cp: int, dim: int) -> None:
    whole = torch.arange(16 * 16).view(16, 16)
    assert torch.equal(zigzag_join([zigzag_slice(whole, cp, rank, dim) for rank in range(cp)], dim), whole)
