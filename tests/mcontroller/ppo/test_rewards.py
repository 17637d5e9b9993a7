from __future__ import annotations

import pytest
import torch

from mcontroller.data.protocol import DataProto
from mcontroller.errors import DataError
from mcontroller.ppo import Reward, outcome_scores
from mcontroller.ppo.rewards import rewarded

MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
BATCH = DataProto.from_dict({"response_mask": MASK})


def test_a_score_is_on_the_last_token_of_its_response():
    assert outcome_scores([1.0, 0.5, 2.0], MASK).tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.5], [2.0, 0.0, 0.0]]


def test_a_bare_tensor_is_a_reward_without_columns():
    reward = rewarded(lambda batch: outcome_scores([1, 1, 1], batch.batch["response_mask"]), BATCH)
    assert reward.token_level_scores.sum().item() == 3.0 and reward.columns == {}


def test_scores_of_another_shape_are_rejected_with_both_shapes():
    with pytest.raises(DataError, match=r"shape \(3,\); expected \(3, 3\)"):
        rewarded(lambda batch: torch.ones(3), BATCH)


def test_a_column_of_another_length_is_rejected_with_its_name():
    with pytest.raises(DataError, match="2 values of 'accuracy' for 3 responses"):
        rewarded(lambda batch: Reward(torch.zeros(3, 3), {"accuracy": [1.0, 0.0]}), BATCH)
