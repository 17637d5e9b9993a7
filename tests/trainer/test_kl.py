from __future__ import annotations

import math

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError
from trainer import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    AlgorithmConfig,
    FixedKLController,
    KLControlConfig,
    apply_kl_penalty,
    estimate_kl,
    register_kl_estimator,
)
from workers.losses.kl import check_kl_loss


def test_estimators_of_a_log_ratio_computed_by_hand():
    log_probs, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    ratio = math.log(2.0)
    expected = {"k1": ratio, "k2": ratio**2 / 2, "k3": 0.5 - 1 + ratio, "abs": ratio}
    for name, value in expected.items():
        assert estimate_kl(log_probs, reference, name).item() == pytest.approx(value, abs=1e-6)
    assert set(expected) <= set(KL_ESTIMATORS)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_have_the_divergence_as_their_mean_over_the_policy(name):
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    divergence = (policy * (policy / reference).log()).sum()
    mean = (policy * estimate_kl(policy.log(), reference.log(), name)).sum()
    torch.testing.assert_close(mean, divergence)


def expected_gradient(name):
    """The mean over the policy's tokens of an estimate and of its gradient by the logits."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
    log_probs = logits.log_softmax(0)
    estimates, policy = KL_ESTIMATORS[name](log_probs - reference), log_probs.exp().detach()
    divergence = (log_probs.exp() * (log_probs - reference)).sum()
    of_divergence = torch.autograd.grad(divergence, logits, retain_graph=True)[0]
    of_estimate = torch.autograd.grad((policy * estimates).sum(), logits)[0]
    return divergence.item(), of_divergence, (policy * estimates).sum().item(), of_estimate


@pytest.mark.parametrize("name", ["k1+", "k3+"])
def test_straight_through_estimators_have_value_and_gradient_of_the_divergence(name):
    divergence, of_divergence, mean, of_estimate = expected_gradient(name)
    assert mean == pytest.approx(divergence, rel=1e-12)
    torch.testing.assert_close(of_estimate, of_divergence, rtol=1e-12, atol=1e-15)


def test_an_estimator_without_a_gradient_in_expectation_cannot_be_a_loss():
    *_, of_k1 = expected_gradient("k1")
    assert of_k1.abs().max().item() < 1e-15
    with pytest.raises(ConfigError) as caught:
        check_kl_loss("k1")
    assert (caught.value.key, caught.value.value) == ("kl_loss_type", "k1")
    assert AlgorithmConfig(kl_penalty="k1").kl_penalty == "k1"
    for name in ("k1+", "k2", "k3", "k3+", "abs"):
        check_kl_loss(name)


def test_k3_is_never_negative():
    log_probs, reference = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    assert (estimate_kl(log_probs, reference, "k3") >= 0).all()


def test_the_adaptive_weight_moves_to_its_target_by_at_most_a_fifth():
    config = KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=1000)
    weights = []
    for kl in (0.11, 5.0, 0.1, 0.0):
        controller = AdaptiveKLController(config)
        controller.update(kl, n_steps=500)
        weights.append(controller.value)
    assert weights == pytest.approx([0.5 * 1.05, 0.5 * 1.1, 0.5, 0.5 * 0.9])


def test_the_fixed_weight_stays():
    controller = FixedKLController(KLControlConfig(kl_coef=0.3))
    controller.update(100.0, n_steps=10_000)
    assert controller.value == 0.3


def test_the_penalty_is_subtracted_from_scores_and_updates_the_controller():
    batch = DataProto.from_dict(
        {
            "token_level_scores": torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]]),
            "old_log_probs": torch.tensor([[-1.0, -2.0, -9.0], [-3.0, 0.0, 0.0]]),
            "ref_log_prob": torch.tensor([[-1.5, -1.0, -1.0], [-4.0, -7.0, 0.0]]),
            "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        }
    )
    controller = AdaptiveKLController(KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=10))
    penalised, metrics = apply_kl_penalty(batch, controller)
    torch.testing.assert_close(
        penalised.batch["token_level_rewards"], torch.tensor([[-0.25, 1.5, 0.0], [1.5, 0.0, 0.0]])
    )
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.5 - 1.0 + 1.0) / 3)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert controller.value == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))
    assert "token_level_rewards" not in batch.batch


def test_unknown_names_are_rejected_with_the_registered_ones():
    with pytest.raises(ConfigError) as caught:
        estimate_kl(torch.zeros(1), torch.zeros(1), "k4")
    assert (caught.value.key, caught.value.value) == ("kl_penalty", "k4")
    with pytest.raises(ConfigError) as caught:
        KLControlConfig(type="adaptiv")
    assert (caught.value.key, caught.value.value) == ("algorithm.kl_ctrl.type", "adaptiv")
    with pytest.raises(ConfigError) as caught:
        KLControlConfig(type="adaptive", target_kl=0.0)
    assert (caught.value.key, caught.value.value) == ("algorithm.kl_ctrl.target_kl", 0.0)


def test_a_custom_estimator_is_chosen_by_its_name():
    @register_kl_estimator("twice_for_this_test")
    def twice(log_ratio):
        return 2 * log_ratio

    assert AlgorithmConfig(kl_penalty="twice_for_this_test").kl_penalty in KL_ESTIMATORS
    assert estimate_kl(torch.ones(1), torch.zeros(1), "twice_for_this_test").item() == 2.0
    with pytest.raises(ConfigError) as caught:
        register_kl_estimator("twice_for_this_test")(lambda log_ratio: log_ratio)
    assert caught.value.key == "twice_for_this_test"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_a_masked_token_reaches_neither_rewards_nor_the_weight(name, value):
    def penalized(at_masked):
        columns = torch.tensor([[[0.0, 1.0, at_masked], [-1.0, at_masked, at_masked]], [[-1.0, 1.5, 0.0]] * 2])
        log_probs, reference = columns
        tensors = {"old_log_probs": log_probs, "ref_log_prob": reference, "token_level_scores": torch.ones(2, 3)}
        tensors["response_mask"] = torch.tensor([[1, 1, 0], [1, 0, 0]])
        controller = AdaptiveKLController(KLControlConfig(type="adaptive", kl_coef=0.5, horizon=10))
        rewards, metrics = apply_kl_penalty(DataProto.from_dict(tensors), controller, name)
        return rewards.batch["token_level_rewards"], metrics, controller.value

    (rewards, metrics, weight), expected = penalized(value), penalized(0.0)
    torch.testing.assert_close(rewards, expected[0], rtol=0, atol=0)
    assert (metrics, weight) == expected[1:] and math.isfinite(weight)


def test_a_token_whose_kl_is_not_finite_does_not_move_the_weight():
    columns = {name: torch.zeros(2, 2) for name in ("old_log_probs", "ref_log_prob", "token_level_scores")}
    columns["old_log_probs"][1, 0] = math.nan
    controller = AdaptiveKLController(KLControlConfig(type="adaptive", kl_coef=0.5))
    with pytest.raises(DataError) as caught:
        apply_kl_penalty(DataProto.from_dict(columns | {"response_mask": torch.ones(2, 2)}), controller)
    assert caught.value.fields["tokens"] == 1 and controller.value == 0.5


def test_the_estimate_is_clipped_on_both_sides():
    log_ratio = torch.tensor([0.5, 3.0, -3.0], requires_grad=True)
    estimate = estimate_kl(log_ratio, torch.zeros(3), "k1", clip=1.0)
    (gradient,) = torch.autograd.grad(estimate.sum(), log_ratio)
    assert estimate.tolist() == [0.5, 1.0, -1.0] and gradient.tolist() == [1.0, 0.0, 0.0]
    tensors = {"old_log_probs": log_ratio.detach()[None], "ref_log_prob": torch.zeros(1, 3)}
    tensors |= {"token_level_scores": torch.zeros(1, 3), "response_mask": torch.ones(1, 3)}
    controller = FixedKLController(KLControlConfig(kl_coef=2.0))
    rewards, metrics = apply_kl_penalty(DataProto.from_dict(tensors), controller, "k1", 1.0)
    assert rewards.batch["token_level_rewards"].tolist() == [[-1.0, -2.0, 2.0]]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5 / 3)
