from __future__ import annotations

import numpy as np
import pytest
import torch

from mcontroller.data.protocol import DataProto
from mcontroller.errors import ConfigError, DataError
from mcontroller.ppo import (
    ADVANTAGE_ESTIMATORS,
    AlgorithmConfig,
    compute_advantage,
    compute_gae,
    register_advantage_estimator,
)
from mcontroller.ppo.advantages import whiten


def gae_by_double_loop(rewards, values, mask, gamma, lam):
    """The definition: at every step, the discounted sum over the steps from it on."""
    advantages = torch.zeros_like(values)
    for row in range(values.size(0)):
        steps = [t for t in range(values.size(1)) if mask[row, t]]
        for start in range(len(steps)):
            for ahead in range(start, len(steps)):
                following = values[row, steps[ahead + 1]] if ahead + 1 < len(steps) else 0.0
                error = rewards[row, steps[ahead]] + gamma * following - values[row, steps[ahead]]
                advantages[row, steps[start]] += (gamma * lam) ** (ahead - start) * error
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.0, 0.5), (0.99, 0.0)])
def test_gae_is_the_double_sum_of_its_definition_also_with_gaps_in_the_mask(gamma, lam):
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 12, 9, generator=generator, dtype=torch.float64)
    mask = (torch.rand(12, 9, generator=generator) < 0.7).long()
    mask[0], mask[1] = 0, 1
    advantages, returns = compute_gae(rewards, values, mask, gamma, lam)
    expected = gae_by_double_loop(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, (expected + values) * mask, rtol=0, atol=1e-12)


def test_gae_of_a_response_computed_by_hand():
    rewards = torch.tensor([[0.0, 0.0, 1.0, 7.0]])
    values = torch.tensor([[0.5, 0.25, 0.75, float("nan")]])
    mask = torch.tensor([[1, 1, 1, 0]])
    advantages, returns = compute_gae(rewards, values, mask, gamma=1.0, lam=0.5)
    # errors: 0.25 - 0.5 = -0.25, 0.75 - 0.25 = 0.5, 1 - 0.75 = 0.25
    torch.testing.assert_close(advantages, torch.tensor([[-0.25 + 0.5 * 0.625, 0.5 + 0.5 * 0.25, 0.25, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.5625, 0.875, 1.0, 0.0]]))


def test_with_lambda_one_the_returns_are_the_future_rewards_for_any_critic():
    rewards = torch.tensor([[1.0, 2.0, 3.0]])
    returns = [compute_gae(rewards, values, torch.ones(1, 3), 1.0, 1.0)[1] for values in torch.randn(2, 1, 3)]
    for each in returns:
        torch.testing.assert_close(each, torch.tensor([[6.0, 5.0, 3.0]]))


def test_whitened_advantages_have_mean_0_and_variance_1_over_the_tokens_alone():
    values = torch.tensor([[1.0, 2.0, 100.0], [3.0, 6.0, -50.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    white = whiten(values, mask)
    kept = white[mask.bool()]
    assert kept.mean().abs() < 1e-6 and abs(kept.var(correction=0) - 1.0) < 1e-6
    assert white[:, 2].tolist() == [0.0, 0.0]


def scored(totals: list[float], uids: list[str]) -> DataProto:
    mask = torch.tensor([[1, 1, 0]] * len(totals))
    rewards = torch.tensor([[0.0, total, 5.0] for total in totals])
    return DataProto.from_dict(
        {"token_level_rewards": rewards, "response_mask": mask}, {"uid": np.array(uids, dtype=object)}
    )


def test_grpo_compares_a_response_with_those_of_the_same_problem():
    batch = scored([1.0, 5.0, 0.0, 7.0], ["a", "b", "a", "c"])
    advantages = compute_advantage(batch, "grpo", normalize=False).batch["advantages"]
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1.0, 0.0, -1.0, 0.0]), rtol=0, atol=1e-5)
    assert (advantages[:, 2] == 0).all() and torch.equal(advantages[:, 0], advantages[:, 1])


def test_rloo_subtracts_the_mean_of_the_others():
    batch = scored([1.0, 0.0, 2.0, 9.0], ["a", "a", "a", "b"])
    advantages = compute_advantage(batch, "rloo", normalize=False).batch["advantages"]
    torch.testing.assert_close(advantages[:, 0], torch.tensor([0.0, -1.5, 1.5, 0.0]))


def test_a_custom_estimator_is_chosen_by_its_name():
    @register_advantage_estimator("constant_for_this_test")
    def constant(data, *, gamma, lam):
        return torch.full((2, 3), gamma), torch.full((2, 3), lam)

    assert AlgorithmConfig(adv_estimator="constant_for_this_test").adv_estimator in ADVANTAGE_ESTIMATORS
    assert not ADVANTAGE_ESTIMATORS["constant_for_this_test"].needs_critic
    result = compute_advantage(scored([1.0, 2.0], ["a", "b"]), "constant_for_this_test", 0.5, 0.25, normalize=False)
    assert result.batch["advantages"].unique().tolist() == [0.5]
    assert result.batch["returns"].unique().tolist() == [0.25]
    with pytest.raises(ConfigError, match="already"):
        register_advantage_estimator("constant_for_this_test")(lambda data, *, gamma, lam: None)


def test_an_unknown_estimator_is_rejected_with_the_registered_ones():
    with pytest.raises(
        ConfigError, match=r"'gea', and there is no such advantage estimator: did you mean gae.*gae, grpo, rloo"
    ):
        compute_advantage(scored([1.0], ["a"]), "gea")


def test_a_missing_column_is_named_with_the_present_ones():
    with pytest.raises(DataError, match=r"lacks column.* values; it has token_level_rewards, response_mask") as caught:
        compute_advantage(scored([1.0], ["a"]), "gae")
    assert caught.value.columns == ["values"]
    with pytest.raises(DataError, match="uid"):
        compute_advantage(scored([1.0], ["a"]).select(non_tensor_batch_keys=[]), "grpo")
