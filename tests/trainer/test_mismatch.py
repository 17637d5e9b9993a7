from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError
from trainer.estimators.registry import compute_advantage
from trainer.mismatch import ImportanceConfig, importance_weights, mismatch_metrics, version_metrics
from trainer.summary import decoded_samples, experience_metrics, sample_tokens, signal_metrics
from workers.losses.policy import clipped_policy_loss

BUILT_IN = ("gae", "grpo", "rloo", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax")


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
        (ImportanceConfig("token", "mask", 3.0, 0.6), [[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]], 2 / 3),
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
    with pytest.raises(ConfigError) as caught:
        ImportanceConfig("seq")
    assert (caught.value.key, caught.value.value) == ("algorithm.importance.level", "seq")


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask", "decoupled"])
@pytest.mark.parametrize("off_policy_mask", [None, 0.1])
def test_weights_equal_their_formula(level, mode, off_policy_mask):
    """The formula row by row in numpy, of tokens of several versions, some of an environment."""
    chance = np.random.default_rng(7)
    policy, rollout = chance.normal(-2, 0.4, (2, 24, 9)).astype(np.float32)
    mask = (chance.random((24, 9)) < 0.7).astype(np.int64)
    advantages = np.repeat(chance.normal(size=(24, 1)).astype(np.float32), 9, 1)
    expected = np.zeros((24, 9))
    for row in range(24):
        counted = mask[row] == 1
        log_ratio = (policy - rollout)[row, counted].astype(np.float64)
        sums = {"token": log_ratio, "sequence": log_ratio.sum(), "geometric": log_ratio.mean()}
        ratio = np.exp(sums[level]) * np.ones(counted.sum())
        limits = {"truncate": np.minimum(ratio, 1.3), "decoupled": ratio}
        limits["mask"] = np.where((ratio >= 0.8) & (ratio <= 1.3), ratio, 0.0)
        masked = off_policy_mask is not None and advantages[row, 0] < 0 and -log_ratio.mean() > off_policy_mask
        expected[row, counted] = 0.0 if masked else limits[mode]
    tensors = {"old_log_probs": policy, "rollout_log_probs": rollout, "response_mask": mask, "advantages": advantages}
    data = DataProto.from_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
    limited = {"threshold": 1.3} if mode != "decoupled" else {}
    limited |= {"least": 0.8} if mode == "mask" else {}
    config = ImportanceConfig(level, mode, **limited, off_policy_mask=off_policy_mask)
    computed, metrics = importance_weights(data, config)
    np.testing.assert_allclose(computed.numpy(), expected, rtol=2e-6, atol=1e-7)
    if off_policy_mask is not None:
        assert 0.05 < metrics["training/off_policy_masked_fraction"] < 0.5


def test_the_off_policy_mask_alone_gives_weights_of_0_and_1():
    """Means of log(rollout / policy): 0 of the first response, log(1 / 4) of the second; then the reverse."""
    data = generated().with_tensors({"advantages": torch.full((2, 3), -1.0)})
    weights, metrics = importance_weights(data, ImportanceConfig(off_policy_mask=0.5))
    torch.testing.assert_close(weights, data.batch["response_mask"].float())
    swapped = {"old_log_probs": "rollout_log_probs", "rollout_log_probs": "old_log_probs"}
    data = data.with_tensors({name: data.batch[other] for name, other in swapped.items()})
    weights, metrics = importance_weights(data, ImportanceConfig(off_policy_mask=0.5))
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert metrics["training/off_policy_masked_fraction"] == pytest.approx(1 / 3)


def test_decoupled_ppo_has_three_policies():
    """The loss of the actor with these weights against the formula, for a policy that has made a step since."""
    chance = np.random.default_rng(8)
    behavior, proximal = chance.normal(-2, 0.3, (2, 16, 5))
    current, mask = proximal + chance.normal(0, 0.3, (16, 5)), np.ones((16, 5), np.int64)
    advantages = chance.normal(size=(16, 5))
    ratio = np.exp(current - proximal)
    expected = -np.exp(proximal - behavior) * np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    columns = {"old_log_probs": proximal, "rollout_log_probs": behavior, "response_mask": mask}
    data = DataProto.from_dict({name: torch.from_numpy(value) for name, value in columns.items()})
    weights, _ = importance_weights(data, ImportanceConfig("token", "decoupled"))
    policy = torch.from_numpy(current), torch.from_numpy(proximal), torch.from_numpy(advantages)
    loss = clipped_policy_loss(*policy, torch.ones(16, 5), clip_low=0.2, clip_high=0.2).loss * weights
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-6)


def test_the_mismatch_is_measured_by_version():
    data = generated().with_tensors({"token_versions": torch.tensor([[3, 5, -1], [5, -1, -1]])})
    metrics = version_metrics(data, newest=5)
    assert metrics == {
        "training/tokens_behind_0": pytest.approx(2 / 3),
        "training/tokens_behind_2": pytest.approx(1 / 3),
        "training/rollout_kl_behind_0": pytest.approx((math.log(2) + math.log(0.25)) / 2),
        "training/rollout_kl_behind_2": pytest.approx(math.log(0.5)),
    }


def test_samples_have_their_tokens_with_what_they_were_trained_on() -> None:
    """A tokenizer that drops the space before its first token, as sentencepiece does; the tool answers with token 3."""

    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "".join(("", " is", " it", "?")[token] for token in ids).removeprefix(" ")

    tensors = {
        "responses": torch.tensor([[2, 3, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]),
        "response_mask": torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]),
        "advantages": torch.tensor([[0.5, 9.0, -1.0, 9.0], [0.12345, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]]),
    }
    expected = [
        {"text": ["it", "?", " is"], "advantage": [0.5, None, -1.0]},
        {"text": ["is"], "advantage": [0.123]},
        {"text": [], "advantage": []},
    ]
    assert sample_tokens(DataProto.from_dict(tensors), Tokenizer(), 3) == expected
    probabilities = {"old_log_probs": torch.zeros(3, 4), "rollout_log_probs": torch.full((3, 4), 0.25)}
    (first,) = sample_tokens(DataProto.from_dict(tensors | probabilities), Tokenizer(), 1)
    assert first == {**expected[0], "mismatch": [-0.25, None, -0.25]}
    assert sample_tokens(DataProto.from_dict(tensors), object(), 3) == []
    scored = DataProto.from_dict(
        {"token_level_scores": torch.tensor([[0.0, 0, 1, 0], [0.5, 0, 0, 0], [0, 0, 0, 0]])},
        non_tensors={"prompt": ["a", "b", "c"]},
    )
    assert decoded_samples(scored, expected[:2]) == [
        {"prompt": "a", "response": "it? is", "score": 1.0},
        {"prompt": "b", "response": "is", "score": 0.5},
    ]


def test_masked_tokens_reach_no_weight_no_advantage_and_no_metric():
    chance = torch.Generator().manual_seed(9)
    names = "old_log_probs rollout_log_probs values token_level_rewards token_level_scores advantages returns"
    mask = torch.rand(8, 5, generator=chance) < 0.6
    mask[:, 0], mask[:, 4] = True, False
    columns = {name: torch.randn(8, 5, generator=chance) for name in names.split()}

    def results(at_masked):
        tensors = {name: torch.where(mask, column, at_masked) for name, column in columns.items()}
        tensors |= {"response_mask": mask.long(), "greedy_scores": torch.ones(8)}
        tensors["token_versions"] = torch.where(mask, 3, -1)
        data = DataProto.from_dict(tensors, {"uid": np.arange(8) // 4})
        config = ImportanceConfig("sequence", "mask", off_policy_mask=0.1)
        weights, metrics = importance_weights(data, config)
        metrics |= mismatch_metrics(data) | version_metrics(data, 4) | experience_metrics(data) | signal_metrics(data)
        without = data.select([name for name in tensors if name not in ("advantages", "returns")])
        advantages = [compute_advantage(without, name).batch["advantages"] for name in BUILT_IN]
        return metrics, torch.stack([weights, *advantages])

    (metrics, tensors), (expected, expected_tensors) = results(math.nan), results(0.0)
    assert metrics == expected
    torch.testing.assert_close(tensors, expected_tensors, rtol=0, atol=0)
