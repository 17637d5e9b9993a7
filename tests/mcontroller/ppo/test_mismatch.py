from __future__ import annotations

import math

import pytest
import torch

from mcontroller.data.protocol import DataProto
from mcontroller.errors import ConfigError
from mcontroller.ppo.mismatch import ImportanceConfig, importance_weights, mismatch_metrics


def generated() -> DataProto:
    """Two responses; ratios policy / rollout are 2 and 0.5, then 4; the last column is padding."""
    policy = torch.tensor([[0.4, 0.2, 0.9], [0.8, 0.1, 0.1]]).log()
    rollout = torch.tensor([[0.2, 0.4, 0.1], [0.2, 0.7, 0.9]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    return DataProto.from_dict({"old_log_probs": policy, "rollout_log_probs": rollout, "response_mask": mask})


@pytest.mark.parametrize(
    ("config", "weights", "limited"),
    [
        (ImportanceConfig("token", threshold=3.0), [[2.0, 0.5, 0.0], [3.0, 0.0, 0.0]], 1 / 3),
        (ImportanceConfig("sequence", threshold=3.0), [[1.0, 1.0, 0.0], [3.0, 0.0, 0.0]], 1 / 3),
        (ImportanceConfig("token", "mask", 3.0), [[2.0, 0.5, 0.0], [0.0, 0.0, 0.0]], 1 / 3),
        (ImportanceConfig("token", "mask", 3.0, 0.6), [[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]], 2 / 3),
        (ImportanceConfig("sequence", "mask", 3.0), [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]], 1 / 3),
    ],
)
def test_weights_of_tokens_and_sequences_are_truncated_or_masked(config, weights, limited):
    computed, metrics = importance_weights(generated(), config)
    torch.testing.assert_close(computed, torch.tensor(weights))
    assert metrics["training/importance_limited_fraction"] == pytest.approx(limited)
    assert metrics["training/importance_weight_mean"] == pytest.approx(sum(map(sum, weights)) / 3)


def test_the_mismatch_is_measured_on_response_tokens():
    metrics = mismatch_metrics(generated())
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx((0.2 + 0.2 + 0.6) / 3)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.6)
    assert metrics["training/rollout_kl"] == pytest.approx((math.log(0.5) + math.log(2) + math.log(0.25)) / 3)
    assert mismatch_metrics(generated().select(["old_log_probs", "response_mask"])) == {}


def test_unknown_levels_are_rejected():
    with pytest.raises(ConfigError, match=r"algorithm.importance.level is 'seq'; possible: none, token, sequence"):
        ImportanceConfig("seq")
