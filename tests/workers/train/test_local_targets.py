"""A rank without targets goes through the output layer as the others do."""

from __future__ import annotations

import torch

from workers.train.packing import locate_local_targets


def test_rank_without_targets_keeps_one_whose_result_is_0() -> None:
    local = locate_local_targets(torch.zeros(2, 3), torch.zeros(2, 3).long(), 4, None, cp=1, rank=0)
    values = torch.tensor([5.0], requires_grad=True)
    assert local.empty and local.index.tolist() == local.predictors.tolist() == [0]
    assert local.scatter(values, torch.Size((2, 3))).tolist() == [[0.0] * 3] * 2
