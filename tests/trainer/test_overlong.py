from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError
from tests.trainer.toy import ToyActor, ToyCritic, toy_config, toy_trainer
from trainer import AlgorithmConfig, Role
from trainer.rewards.reward import Reward, outcome_scores
from trainer.selection import FilterGroupsConfig, GroupFilter, OverlongConfig, penalized, truncated_rows
from trainer.validation import validation_metrics
from workers.role_worker import PolicySettings

LENGTHS = torch.tensor([3, 6, 8, 10])
MASK = (torch.arange(10) < LENGTHS[:, None]).long()


def test_the_penalty_grows_over_the_buffer_to_the_longest_response():
    reward = Reward(outcome_scores([1.0] * 4, MASK), {"accuracy": [1.0] * 4})
    result = penalized(reward, MASK, OverlongConfig(buffer=4, penalty=0.5), 10)
    assert result.token_level_scores.sum(1).tolist() == [1.0, 1.0, 0.75, 0.5]
    assert result.token_level_scores[2, 7] == 0.75 and result.columns["overlong_penalty"] == [0.0, 0.0, -0.25, -0.5]


@pytest.mark.parametrize("width", [10, 8, 12])
def test_the_penalty_counts_back_from_the_limit_for_one_and_several_turns(width):
    """Of a batch of another width, the second response with tokens of an environment in between."""
    mask = torch.zeros(3, width, dtype=torch.long)
    mask[0, :8], mask[1, [0, 1, 7]], mask[2, :6] = 1, 1, 1
    result = penalized(Reward(torch.zeros(3, width)), mask, OverlongConfig(buffer=4, penalty=0.5), 10)
    assert result.columns["overlong_penalty"] == [-0.25, -0.25, 0.0]


def test_the_trainer_penalizes_with_the_configured_response_length():
    def config(rollout, buffer):
        algorithm = AlgorithmConfig(overlong=OverlongConfig(buffer=buffer))
        actor = SimpleNamespace(rollout=SimpleNamespace(**rollout))
        return dataclasses.replace(toy_config(1), algorithm=algorithm, actor_rollout_ref=actor)

    class Configured(ToyActor):
        def __init__(self, config, role):
            super().__init__(0.5, role)

        @classmethod
        def policy_settings(cls, config):
            return PolicySettings(response_length=getattr(config.rollout, "response_length", None))

    def score(**rollout):
        roles = {Role.ActorRolloutRef: Configured, Role.Critic: ToyCritic}
        given = config(rollout, buffer=2)
        with toy_trainer(given, roles, reward_fn=lambda batch: [1.0] * len(batch), val_dataset=None) as trainer:
            trainer.init_workers()
            return trainer.train_step(trainer.draw())["train/score"]

    assert (score(response_length=1), score(response_length=2), score(response_length=3)) == (0.0, 0.5, 1.0)
    with pytest.raises(ConfigError) as caught:
        score()
    assert caught.value.key == "algorithm.overlong.buffer"


def test_a_response_is_truncated_if_it_does_not_end_with_a_stop_token():
    responses = torch.zeros(4, 10, dtype=torch.long)
    responses[0, 2], responses[1, 5], responses[2, 7] = 1, 2, 5
    batch = DataProto.from_dict({"responses": responses, "response_mask": MASK})
    assert truncated_rows(batch, [1, 2]).tolist() == [False, False, True, True]
    responses[3, -1] = 2
    assert truncated_rows(batch, [1, 2]).tolist() == [False, False, True, False]
    said = batch.union(DataProto.from_dict({"truncated": torch.tensor([True, False, False, False])}))
    assert truncated_rows(said, [1, 2]).tolist() == [True, False, False, False]


def test_groups_are_filtered_by_a_column_and_filled_up_in_order():
    def batch(uids):
        rows = {"row": torch.tensor(uids) * 10 + torch.tensor([0, 1] * 2)}
        return DataProto.from_dict(rows, {"uid": uids})

    def reward(accuracy):
        samples = [{"accuracy": value} for value in accuracy]
        return Reward(torch.arange(4.0)[:, None], {"accuracy": accuracy}, samples)

    groups = GroupFilter(FilterGroupsConfig(enable=True, metric="accuracy", max_batches=2), 2)
    groups.add(batch([0, 0, 1, 1]), reward([1.0, 1.0, 0.0, 0.0]))
    assert not groups.is_complete
    groups.add(batch([2, 2, 3, 3]), reward([0.0, 0.0, 1.0, 0.0]))
    assert groups.is_complete
    chosen, metrics = groups.batch()
    assert chosen.batch["row"].tolist() == [30, 31, 0, 1]
    assert [sample["accuracy"] for sample in groups.reward().samples] == [1.0, 0.0, 1.0, 1.0]
    assert metrics == {
        "dynamic_sampling/batches": 2.0,
        "dynamic_sampling/prompts_drawn": 4.0,
        "dynamic_sampling/prompts_filled": 1.0,
        "dynamic_sampling/prompts_dropped": 0.0,
    }
    with pytest.raises(DataError) as caught:
        GroupFilter(FilterGroupsConfig(True, "other"), 2).add(batch([0, 0, 1, 1]), reward([1.0] * 4))
    assert (caught.value.key, caught.value.value) == ("algorithm.filter_groups.metric", "other")


def test_validation_reports_mean_best_and_majority():
    scores = torch.tensor([[1.0], [0.0], [0.0], [0.0], [1.0], [1.0]])
    metrics = validation_metrics(Reward(scores, answers=["4", "5", "5", "7", "8", "8"]), 3)
    assert metrics["held_out/mean_at_3"] == pytest.approx(0.5) == metrics["held_out/score"]
    assert metrics["held_out/best_at_3"] == 1.0 and metrics["held_out/maj_at_3"] == 0.5
    assert "held_out/maj_at_3" not in validation_metrics(Reward(scores), 3)
