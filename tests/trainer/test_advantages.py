from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError
from trainer import (
    ADVANTAGE_ESTIMATORS,
    AlgorithmConfig,
    GAEOptions,
    GPGOptions,
    GRPOOptions,
    KLInReward,
    RLOOOptions,
    compute_advantage,
    compute_gae,
    register_advantage_estimator,
)
from trainer.estimators.built_in import discounted_sums, packed_left, unpacked, whiten
from trainer.estimators.clips import clipped_advantages, clipped_scores
from trainer.estimators.registry import AdvantageEstimator


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
    for row in returns:
        torch.testing.assert_close(row, torch.tensor([[6.0, 5.0, 3.0]]))


def test_whitened_advantages_have_mean_0_and_variance_1_over_the_tokens_alone():
    values = torch.tensor([[1.0, 2.0, 100.0], [3.0, 6.0, -50.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    white = whiten(values, mask)
    kept = white[mask.bool()]
    assert kept.mean().abs() < 1e-6 and abs(kept.var(correction=0) - 1.0) < 1e-6
    assert white[:, 2].tolist() == [0.0, 0.0]
    equal = torch.full((64, 333), 100.3)  # the rounding of their mean is 1e-5, and the least deviation 1e-4
    assert whiten(equal, torch.ones_like(equal)).eq(0.0).all()


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
def test_discounted_sums_of_blocks_equal_a_loop_over_columns(decay, width):
    values = torch.randn(3, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    expected, later = torch.empty_like(values), torch.zeros(3, dtype=torch.float64)
    for column in reversed(range(width)):
        later = values[:, column] + decay * later
        expected[:, column] = later
    torch.testing.assert_close(discounted_sums(values, decay), expected, rtol=0, atol=1e-12)


def test_entries_packed_to_the_left_come_back_to_their_columns():
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0]])
    values = torch.arange(1.0, 16.0).view(3, 5)
    assert packed_left(values, mask).tolist() == [[2, 4, 5, 0, 0], [0, 0, 0, 0, 0], [11, 12, 0, 0, 0]]
    assert torch.equal(unpacked(packed_left(values, mask), mask), values * mask)


def scored(totals: list[float], uids: list[str], lengths: list[int] | None = None) -> DataProto:
    """Responses with their score on the last token; the reward of a token outside of the mask is 5."""
    lengths = lengths or [2] * len(totals)
    mask = torch.zeros(len(totals), max(lengths) + 1, dtype=torch.long)
    rewards = torch.zeros(mask.shape)
    for row, (total, length) in enumerate(zip(totals, lengths, strict=True)):
        mask[row, :length] = 1
        rewards[row, length - 1] = total
        rewards[row, length:] = 5.0
    return DataProto.from_dict(
        {"token_level_rewards": rewards, "response_mask": mask}, {"uid": np.array(uids, dtype=object)}
    )


def per_row(batch: DataProto, name: str, options: object = None) -> list[float]:
    """The advantage of every response, which is the same on each of its tokens and 0 elsewhere."""
    advantages = compute_advantage(batch, name, options=options).batch["advantages"]
    mask = batch.batch["response_mask"].bool()
    assert advantages.dtype == torch.float32 and (advantages[~mask] == 0).all()
    assert all(row[kept].unique().numel() == 1 for row, kept in zip(advantages, mask, strict=True))
    return advantages[:, 0].tolist()


GROUP_ESTIMATORS = [name for name in ("grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.7])
def test_a_group_of_equal_scores_has_an_advantage_of_exactly_0(name, value):
    batch = scored([value] * 7 + [0.0, 1.0, 5.0], ["same"] * 7 + ["other"] * 3, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    assert ADVANTAGE_ESTIMATORS[name].needs_group
    advantages = per_row(batch, name)
    assert advantages[:7] == [0.0] * 7
    assert all(advantages[7:])


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_scores_that_depend_only_on_the_prompt_train_nothing(name):
    batch = scored([float(row // 4) for row in range(32)], [str(row // 4) for row in range(32)])
    assert per_row(batch, name) == [0.0] * 32


def test_grpo_compares_a_response_with_those_of_the_same_problem():
    batch = scored([1.0, 5.0, 0.0, 7.0], ["a", "b", "a", "c"])
    assert per_row(batch, "grpo") == pytest.approx([1.0, 0.0, -1.0, 0.0], abs=1e-5)


def test_grpo_scales_by_the_group_by_the_batch_or_not_at_all():
    totals = [1.0, 2.0, 6.0, 0.0, 4.0, 4.0]
    batch = scored(totals, ["a"] * 3 + ["b"] * 3)
    centered = np.array([-2.0, -1.0, 3.0, -8 / 3, 4 / 3, 4 / 3])
    for ddof in (0, 1):
        by_group = [float(np.std(part, ddof=ddof)) for part in (totals[:3], totals[3:]) for _ in range(3)]
        result = per_row(batch, "grpo", GRPOOptions(ddof=ddof))
        assert result == pytest.approx(centered / by_group, abs=1e-5)
        by_batch = per_row(batch, "grpo", GRPOOptions(scale="batch", ddof=ddof))
        assert by_batch == pytest.approx(centered / np.std(totals, ddof=ddof), abs=1e-5)
    assert per_row(batch, "grpo", GRPOOptions(scale="none")) == pytest.approx(centered)
    with pytest.raises(ConfigError) as caught:
        GRPOOptions(scale="std")
    assert (caught.value.key, caught.value.value) == ("algorithm.grpo.scale", "std")


def test_rloo_subtracts_the_mean_of_the_others():
    assert per_row(scored([1.0, 0.0, 2.0, 9.0], ["a", "a", "a", "b"]), "rloo") == [0.0, -1.5, 1.5, 0.0]


def test_opo_weighs_the_scores_of_the_baseline_by_length():
    batch = scored([1.0, 0.0, 3.0], ["a", "a", "b"], [1, 3, 2])
    assert per_row(batch, "opo") == pytest.approx([1.0 - 0.25, -0.25, 0.0])


def test_gpg_makes_up_for_groups_without_signal():
    batch = scored([1.0, 0.0, 3.0, 3.0, 2.0, 2.0], ["a", "a", "b", "b", "c", "c"])
    assert per_row(batch, "gpg") == pytest.approx([1.5, -1.5, 0.0, 0.0, 0.0, 0.0])
    assert per_row(batch, "gpg", GPGOptions(scale="group")) == pytest.approx([3.0, -3.0, 0, 0, 0, 0], abs=1e-4)
    assert per_row(scored([1.0, 1.0], ["a", "a"]), "gpg") == [0.0, 0.0]


def test_reinforce_plus_plus_is_the_whitened_return():
    batch = scored([1.0, -2.0], ["a", "b"], [3, 2])
    result = compute_advantage(batch, "reinforce_plus_plus", gamma=0.5).batch
    returns = torch.tensor([[0.25, 0.5, 1.0, 0.0], [-1.0, -2.0, 0.0, 0.0]])
    torch.testing.assert_close(result["returns"], returns)
    torch.testing.assert_close(result["advantages"], whiten(returns, batch.batch["response_mask"]))


def test_reinforce_plus_plus_baseline_divides_by_the_deviation_over_the_batch():
    batch = scored([1.0, 0.0, 4.0, 0.0], ["a", "a", "b", "b"], [1, 2, 3, 4])
    centered = np.array([0.5, -0.5, 2.0, -2.0])
    assert per_row(batch, "reinforce_plus_plus_baseline") == pytest.approx(centered / np.std(centered), abs=1e-5)


def test_remax_subtracts_the_score_of_the_greedy_response():
    batch = scored([1.0, 3.0], ["a", "b"], [2, 1])
    batch = batch.union(DataProto.from_dict({"greedy_scores": torch.tensor([0.25, 5.0])}))
    assert per_row(batch, "remax") == [0.75, -2.0]
    with pytest.raises(DataError) as caught:
        compute_advantage(scored([1.0], ["a"]), "remax")
    assert caught.value.columns == ["greedy_scores"]


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_a_kl_penalty_in_the_reward_is_added_to_the_advantage_and_never_scaled(name):
    batch = scored([1.0, 1.0, 0.0, 2.0], ["a", "a", "b", "b"])
    penalty = torch.tensor([[-0.1, -0.2, 0.0], [0.3, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, -1.0, 9.0]])
    without = compute_advantage(batch, name).batch["advantages"]
    scores = batch.batch["token_level_rewards"]
    penalized = DataProto.from_dict({"token_level_scores": scores, "token_level_rewards": scores + penalty})
    rest = batch.select(["response_mask"])
    both = compute_advantage(rest.union(penalized), name).batch["advantages"]
    later = torch.tensor([[-0.3, -0.2, 0.0], [0.3, 0.0, 0.0], [0.0, 0.0, 0.0], [-1.0, -1.0, 0.0]])
    torch.testing.assert_close(both - without, later, rtol=0, atol=1e-6)


def test_gae_is_normalized_by_default_and_the_others_are_not():
    batch = scored([1.0, 5.0], ["a", "b"])
    batch = batch.union(DataProto.from_dict({"values": torch.zeros(2, 3)}))
    mask = batch.batch["response_mask"].bool()
    assert compute_advantage(batch, "gae").batch["advantages"][mask].mean().abs() < 1e-6
    plain = compute_advantage(batch, "gae", options=GAEOptions(normalize=False)).batch["advantages"]
    assert plain.tolist() == [[1.0, 1.0, 0.0], [5.0, 5.0, 0.0]]


def test_the_kl_penalty_is_in_the_reward_only_if_the_estimator_allows_it():
    kept = {name for name in ADVANTAGE_ESTIMATORS if "test" not in name and AlgorithmConfig(name).kl_in_reward}
    assert kept == {"gae", "reinforce_plus_plus"}
    assert AlgorithmConfig("rloo", use_kl_in_reward=True).kl_in_reward
    assert ADVANTAGE_ESTIMATORS["grpo"].kl_in_reward is KLInReward.REJECTED
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig("grpo", use_kl_in_reward=True)
    assert (caught.value.key, caught.value.value) == ("algorithm.use_kl_in_reward", True)
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig(normalize_advantages=False)
    assert (caught.value.key, caught.value.value) == ("normalize_advantages", None)


def test_rloo_can_divide_by_the_deviation_of_the_other_responses():
    """Against statistics of the other scores, row by row, with Bessel's correction."""
    scores = [1.0, 0.0, 0.5, 2.0, 1.0, 1.0, 1.0, 0.0, 3.0, 1.0]
    uids = ["a"] * 4 + ["b"] * 4 + ["c"] * 2
    expected = []
    for row, (score, uid) in enumerate(zip(scores, uids, strict=True)):
        others = [scores[at] for at in range(10) if uids[at] == uid and at != row]
        std = stdev(others) if len(others) > 1 else 0.0
        expected.append((score - fmean(others)) / (std + 1e-6 if std else 1.0))
    result = compute_advantage(scored(scores, uids), "rloo", options=RLOOOptions(scale="others"))
    assert result.batch["advantages"][:, 0].tolist() == pytest.approx(expected, rel=1e-5)
    assert expected[7] == -1.0 and expected[8] == 2.0  # the others are equal, or one: not divided


def test_scores_and_advantages_are_clipped():
    """Token scores of three responses; the last one has no tokens."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    scores = torch.tensor([[1.0, 4.0, math.nan], [-1.0, 0.5, -2.5], [0.0, 0.0, 0.0]])
    greedy = torch.tensor([3.0, -0.5, -9.0])
    data = DataProto.from_dict({"token_level_scores": scores, "response_mask": mask, "greedy_scores": greedy})
    limited, metrics = clipped_scores(data, 2.0)
    assert limited.batch["greedy_scores"].tolist() == [2.0, -0.5, -2.0]
    assert limited.batch["token_level_scores"].tolist() == [[1.0, 1.0, 0.0], [-1.0, 0.5, -1.5], [0.0, 0.0, 0.0]]
    assert metrics == {"train/score_clipped": 1.0} and clipped_scores(data, 4.0)[1] == {"train/score_clipped": 0.5}
    assert clipped_scores(data, None) == (data, {}) and clipped_advantages(data, None) == (data, {})
    advantages = torch.tensor([[3.0, -0.5, 0.0], [-3.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    limited, metrics = clipped_advantages(data.with_tensors({"advantages": advantages}), 1.0)
    assert limited.batch["advantages"].tolist() == [[1.0, -0.5, 0.0], [-1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    assert metrics == {"advantages/clipped": pytest.approx(3 / 5)}


def test_options_are_those_of_the_chosen_estimator():
    @dataclass(frozen=True)
    class Options:
        factor: float = 2.0

    @register_advantage_estimator("factor_for_this_test", options=Options)
    def factor(data, *, gamma, lam, options):
        return torch.full((1, 3), options.factor), torch.zeros(1, 3)

    config = AlgorithmConfig("factor_for_this_test", custom={"factor": 3.0})
    assert compute_advantage(scored([1.0], ["a"]), config.adv_estimator, options=config.options()).batch[
        "advantages"
    ].tolist() == [[3.0] * 3]
    assert AlgorithmConfig("grpo", grpo=GRPOOptions(scale="none")).options() == GRPOOptions(scale="none")
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig("factor_for_this_test", custom={"factr": 3.0})
    assert (caught.value.key, caught.value.value) == ("algorithm.custom.factr", None)
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig("grpo", custom={"scale": "none"})
    assert (caught.value.key, caught.value.value) == ("algorithm.custom", {"scale": "none"})
    with pytest.raises(ConfigError) as caught:
        compute_advantage(scored([1.0], ["a"]), "grpo", options=GAEOptions())
    assert caught.value.key == "options"


def test_a_custom_estimator_is_chosen_by_its_name():
    @register_advantage_estimator("constant_for_this_test")
    def constant(data, *, gamma, lam):
        return torch.full((2, 3), gamma), torch.full((2, 3), lam)

    assert AlgorithmConfig(adv_estimator="constant_for_this_test").adv_estimator in ADVANTAGE_ESTIMATORS
    assert not ADVANTAGE_ESTIMATORS["constant_for_this_test"].needs_critic
    result = compute_advantage(scored([1.0, 2.0], ["a", "b"]), "constant_for_this_test", 0.5, 0.25)
    assert result.batch["advantages"].unique().tolist() == [0.5]
    assert result.batch["returns"].unique().tolist() == [0.25]
    with pytest.raises(ConfigError) as caught:
        register_advantage_estimator("constant_for_this_test")(lambda data, *, gamma, lam: None)
    assert caught.value.key == "constant_for_this_test"


def test_an_unknown_estimator_is_rejected_with_the_registered_ones():
    with pytest.raises(ConfigError) as caught:
        compute_advantage(scored([1.0], ["a"]), "gea")
    assert (caught.value.key, caught.value.value) == ("algorithm.adv_estimator", "gea")


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_rows_that_are_all_of_different_prompts_are_an_error(name):
    with pytest.raises(DataError) as caught:
        compute_advantage(scored([1.0, 0.0], ["a", "b"]), name)
    assert caught.value.column == "uid"


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_a_reward_that_is_not_finite_is_an_error_for_a_token_that_counts_alone(name):
    batch, rows = scored([1.0, math.nan, 0.5], ["a", "a", "a"]), torch.tensor([[1], [0], [1]])
    with pytest.raises(DataError) as caught:
        compute_advantage(batch, name)
    assert (caught.value.column, caught.value.row) == ("token_level_rewards", 1)
    without = batch.with_tensors({"response_mask": batch.batch["response_mask"] * rows})
    assert compute_advantage(without, name).batch["advantages"].isfinite().all()


def test_a_missing_column_is_named_with_the_present_ones():
    with pytest.raises(DataError) as caught:
        compute_advantage(scored([1.0], ["a"]), "gae")
    assert caught.value.columns == ["values"]
    assert caught.value.columns == ["values"]
    with pytest.raises(DataError) as caught:
        compute_advantage(scored([1.0], ["a"]).select(non_tensor_batch_keys=[]), "grpo")
    assert caught.value.columns == ["uid"]


@pytest.mark.parametrize(
    ("result", "shapes"),
    [
        (torch.zeros(2, 3), [(2, 3)]),
        ((torch.zeros(2), torch.zeros(2, 3)), [(2,), (2, 3)]),
        ((torch.zeros(2, 3),), [(2, 3)]),
        (None, ["NoneType"]),
    ],
)
def test_results_of_an_estimator_that_do_not_fit_the_responses_are_rejected_with_their_shapes(
    monkeypatch, result, shapes
):
    estimator = AdvantageEstimator(lambda data, *, gamma, lam: result)
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS._entries, "wrong", estimator)
    with pytest.raises(DataError) as caught:
        compute_advantage(scored([1.0, 0.0], ["a", "a"]), "wrong")
    assert (caught.value.shapes, caught.value.expected) == (shapes, (2, 3))
