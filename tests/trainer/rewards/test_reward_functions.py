from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError
from trainer import Reward, outcome_scores, rule_only, weighted_sum
from trainer.rewards.reward import RewardSources, joined, rewarded
from trainer.summary import reward_metrics

MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
BATCH = DataProto.from_dict({"response_mask": MASK})


def test_a_score_is_on_the_last_token_of_its_response():
    assert outcome_scores([1.0, 0.5, 2.0], MASK).tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.5], [2.0, 0.0, 0.0]]


def test_a_bare_tensor_is_a_reward_without_columns():
    reward = rewarded(lambda batch: outcome_scores([1, 1, 1], batch.batch["response_mask"]), BATCH)
    assert reward.token_level_scores.sum().item() == 3.0 and reward.columns == {}


@pytest.mark.parametrize("scores", [[1.0, 0.0, 2], (1, 0, 2), np.array([1, 0, 2]), torch.tensor([1, 0, 2])])
def test_one_score_per_response_is_enough(scores):
    assert rewarded(lambda batch: scores, BATCH).token_level_scores.tolist() == [[0, 1, 0], [0, 0, 0], [2, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64])
def test_scores_of_tokens_are_float32_without_gradients(dtype):
    scores = torch.tensor([[0, 1, 0], [0, 0, 1], [1, 0, 0]], dtype=dtype)
    reward = rewarded(lambda batch: scores.requires_grad_(dtype.is_floating_point), BATCH)
    assert reward.token_level_scores.dtype == torch.float32 and not reward.token_level_scores.requires_grad
    assert reward.row_scores().tolist() == [1.0, 1.0, 1.0]


def test_an_async_reward_function_is_awaited():
    async def later(batch):
        await asyncio.sleep(0)
        return [1.0, 2.0, 3.0]

    assert rewarded(later, BATCH).token_level_scores.sum(1).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("result", "fields"),
    [
        (torch.ones(3, 2), {"shape": (3, 2), "expected": (3, 3)}),
        ([1.0, 2.0], {"length": 2, "expected": 3}),
        ("good", {"value": "good"}),
        ({"score": 1.0}, {"value": {"score": 1.0}}),
        ([1.0, "good", 0.0], {"row": 1, "value": "good"}),
        ([1.0, 0.0, float("nan")], {"row": 2}),
    ],
)
def test_scores_that_do_not_fit_are_rejected_with_the_response(result, fields):
    with pytest.raises(DataError) as caught:
        rewarded(lambda batch: result, BATCH)
    assert caught.value.fields == fields


@pytest.mark.parametrize("name", ["the reward function", "combine_rewards", "the reward model"])
def test_a_score_on_a_token_that_is_not_the_policys_is_rejected(name):
    outside = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
    sources = {
        "the reward function": RewardSources(lambda batch: outside, None, False, None),
        "combine_rewards": RewardSources(lambda batch: [0, 0, 0], None, True, lambda rule, model: outside),
        "the reward model": RewardSources(None, None, True, None),
    }
    scored = BATCH.union(DataProto.from_dict({"rm_scores": outside if name == "the reward model" else 0 * outside}))
    with pytest.raises(DataError) as caught:
        sources[name].score(scored)
    assert (caught.value.row, caught.value.token) == (2, 2)


def test_a_response_without_tokens_of_the_policy_has_a_score_of_zero():
    assert outcome_scores([1.0, 2.0], torch.tensor([[0, 0], [1, 0]])).tolist() == [[0.0, 0.0], [2.0, 0.0]]


def test_a_row_to_which_the_function_does_not_apply_has_no_score():
    reward = rewarded(lambda batch: [3.0, 3.0, None], BATCH)
    assert reward.scored == [True, True, False] and reward.token_level_scores.sum(1).tolist() == [3.0, 3.0, 0.0]
    assert joined([reward, Reward(torch.ones(1, 2))]).scored == [True, True, False, True]
    with_model = RewardSources(lambda batch: [1.0, None, 2.0], None, True, weighted_sum())
    scored = BATCH.union(DataProto.from_dict({"rm_scores": outcome_scores([1.0, 1.0, 1.0], MASK)}))
    assert with_model.score(scored).scored == [True, False, True]


def test_a_column_that_a_batch_lacks_does_not_apply_to_its_rows():
    whole = joined([Reward(torch.ones(2, 3), {"a": [1.0, 2.0]}), Reward(torch.ones(1, 2), {"b": [3.0]})])
    assert whole.token_level_scores.tolist() == [[3.0], [3.0], [2.0]]
    metrics = reward_metrics("held_out", whole)
    assert (metrics["held_out/a"], metrics["held_out/b"]) == (1.5, 3.0)


def test_a_reward_function_and_a_reward_model_are_combined_by_a_function():
    scored = BATCH.union(DataProto.from_dict({"rm_scores": outcome_scores([10.0, 20.0, 30.0], MASK)}))
    both = RewardSources(lambda batch: [1.0, 2.0, 3.0], None, True, weighted_sum(rule=1.0, model=0.1))
    reward = both.score(scored)
    assert reward.token_level_scores.sum(1).tolist() == [2.0, 4.0, 6.0]
    assert reward.columns == {"rule_score": [1.0, 2.0, 3.0], "model_score": [10.0, 20.0, 30.0]}
    reads = RewardSources(lambda batch: 2 * batch.tensors()["rm_scores"], None, True, rule_only)
    assert reads.score(scored, held_out=True).token_level_scores.sum(1).tolist() == [20.0, 40.0, 60.0]
    alone = RewardSources(None, None, True, None)
    assert alone.score(scored).token_level_scores.sum(1).tolist() == [10.0, 20.0, 30.0]
    with pytest.raises(ConfigError) as caught:
        RewardSources(lambda batch: [1.0], None, True, None)
    assert caught.value.key == "combine_rewards"
    with pytest.raises(ConfigError) as caught:
        RewardSources(None, None, False, None)
    assert caught.value.key == "reward_fn"


def test_a_column_of_another_length_is_rejected_with_its_name():
    with pytest.raises(DataError) as caught:
        rewarded(lambda batch: Reward(torch.zeros(3, 3), {"accuracy": [1.0, 0.0]}), BATCH)
    assert (caught.value.column, caught.value.length) == ("accuracy", 2)


def test_scores_of_episodes_are_added_to_those_of_the_reward_function_and_are_enough():
    mask, nan = torch.tensor([[1, 0], [1, 1], [1, 1]]), float("nan")

    def batch(scores, failed=(False, False, False)):
        columns = {"response_mask": mask, "episode_scores": torch.tensor(scores), "failed": torch.tensor(failed)}
        return DataProto.from_dict(columns)

    alone = RewardSources(None, None, False, None, has_episodes=True)
    assert alone.score(batch([2.0, nan, -1.0])).row_scores().tolist() == pytest.approx([2.0, nan, -1.0], nan_ok=True)
    with pytest.raises(DataError) as caught:
        alone.score(batch([nan, nan, nan]))
    assert caught.value.rows == 3
    assert alone.score(batch([nan, nan, nan], (True, True, True))).row_scores().isnan().all()
    with_function = RewardSources(lambda batch: [1.0, None, None], None, False, None, has_episodes=True)
    reward = with_function.score(batch([2.0, nan, 3.0]))
    assert reward.row_scores().tolist() == pytest.approx([3.0, nan, 3.0], nan_ok=True)
    assert with_function.score(batch([nan, nan, nan])).columns == {}
    with_model = RewardSources(None, None, True, None, has_episodes=True)
    model = DataProto.from_dict({"rm_scores": torch.tensor([[0.5, 0.0]] * 3)})
    assert with_model.score(batch([2.0, 1.0, 0.0]).union(model)).row_scores().tolist() == [2.5, 1.5, 0.5]
    assert with_model.score(batch([nan, nan, nan]).union(model)).row_scores().tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("scores", [None, [[1.0], [1.0, 2.0]], "text"])
def test_token_scores_that_are_no_tensor_are_rejected(scores):
    with pytest.raises(DataError) as caught:
        rewarded(lambda batch: Reward(scores), BATCH)
    assert caught.value.fields == {"value": scores}


def test_samples_of_some_rewards_alone_are_left_out():
    with_samples = Reward(torch.zeros(1, 2), samples=[{"prompt": "a"}])
    assert joined([with_samples, with_samples]).samples == [{"prompt": "a"}] * 2
    assert joined([with_samples, Reward(torch.zeros(1, 2))]).samples == []


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"samples": [{}, {}]}, {"column": "samples", "length": 2, "expected": 3}),
        ({"answers": ["1"]}, {"column": "answers", "length": 1, "expected": 3}),
        ({"scored": [True] * 4}, {"column": "scored", "length": 4, "expected": 3}),
        ({"columns": {"accuracy": 1.0}}, {"column": "accuracy", "length": None, "expected": 3}),
        ({"columns": {"accuracy": [1.0, None, 0.0]}}, {"column": "accuracy", "row": 1, "value": None}),
        ({"answers": ["1", "2", ["3"]]}, {"column": "answers", "row": 2, "value": ["3"]}),
        ({"samples": [{}, {}, "text"]}, {"column": "samples", "row": 2, "value": "text"}),
    ],
)
def test_values_that_do_not_fit_the_responses_are_rejected_with_both_numbers(values, fields):
    with pytest.raises(DataError) as caught:
        rewarded(lambda batch: Reward(torch.zeros(3, 3), **values), BATCH)
    assert caught.value.fields == fields
