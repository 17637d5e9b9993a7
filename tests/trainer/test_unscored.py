"""Responses without a score: those that a reward function returned None for, or failed for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from tests.trainer.toy import ToyActor, ToyCritic, toy_config, toy_trainer
from trainer import AlgorithmConfig, DataConfig, Reward, Role, compute_advantage
from trainer.selection import FilterGroupsConfig, GroupFilter
from trainer.validation import validation_metrics

SCORES = [-1.0, -1.0, -1.0, None, *[None] * 4, 1.0, 0.0, None, 2.0, 0.0, 1.0, 0.0, 1.0]
"""Of four responses to each of four prompts."""
ROWS = torch.tensor([row for row, score in enumerate(SCORES) if score is not None])
UPDATED: dict[str, DataProto] = {}
"""What actor and critic were trained on, by role; a test clears it."""


class FourResponses(ToyActor):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        prompts.meta_info.setdefault("n", 4)
        return super().generate_sequences(prompts)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        UPDATED["actor"] = data
        return super().update_actor(data)


class Watched(ToyCritic):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        UPDATED["critic"] = data
        return super().update_critic(data)


def step(estimator, reward_fn):
    """Return the metrics of one step on four prompts."""
    UPDATED.clear()
    algorithm = AlgorithmConfig(adv_estimator=estimator, use_kl_in_reward=False)
    config = dataclasses.replace(toy_config(1), algorithm=algorithm, data=DataConfig(train_batch_size=4))
    roles = {Role.ActorRolloutRef: FourResponses, Role.Critic: Watched}
    with toy_trainer(config, roles, reward_fn=reward_fn, val_dataset=None) as trainer:
        trainer.init_workers()
        return trainer.train_step(trainer.draw())


def scores_of(batch):
    return SCORES if len(batch) == len(SCORES) else [0.5] * len(batch)


ESTIMATORS = ("grpo", "rloo", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gae")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_response_without_a_score_is_in_no_baseline_and_no_loss(estimator):
    metrics = step(estimator, scores_of)
    for role, data in UPDATED.items():
        mask = data.batch["response_mask"]
        assert mask.any(1).nonzero().flatten().tolist() == ROWS.tolist(), role
        read = [name for name in data.tensors() if name not in ("advantages", "returns")]
        scored = DataProto.from_dict(dict(data.select(read).select_idxs(ROWS).tensors()), {"uid": (ROWS // 4).tolist()})
        alone = compute_advantage(scored, estimator)
        for name in ("advantages", "returns"):
            column = torch.zeros(mask.shape).index_copy(0, ROWS, alone.batch[name])
            torch.testing.assert_close(data.batch[name], column, rtol=0, atol=0, msg=f"{role} {name}")
    assert metrics["train/unscored"] == 6 / 16 and metrics["train/score"] == pytest.approx(0.2)
    assert metrics["response/rows"] == 10.0 and metrics["response/length_min"] == 1.0
    assert ("critic" in UPDATED) == (estimator == "gae")


def test_equal_scores_beside_a_missing_one_have_an_advantage_of_zero():
    metrics = step("grpo", scores_of)
    assert UPDATED["actor"].batch["advantages"][:8].tolist() == [[0.0]] * 8
    assert metrics["train/frac_reward_zero_std"] == 0.5 and metrics["advantages/abs_mean_equal"] == 0.0


def test_a_batch_without_any_score_changes_no_weights():
    metrics = step("grpo", lambda batch: [None] * len(batch))
    assert UPDATED == {} and metrics["actor/skipped_steps"] == 1.0
    assert metrics["train/unscored"] == 1.0 and metrics["response/rows"] == 0.0 and "train/score" not in metrics


def test_responses_to_a_prompt_whose_greedy_response_has_no_score_are_left_out():
    step("remax", lambda batch: [1.0] * 16 if len(batch) == 16 else [0.5, None, 0.5, 0.5])
    assert UPDATED["actor"].batch["response_mask"].flatten().tolist() == [1] * 4 + [0] * 4 + [1] * 8
    assert UPDATED["actor"].batch["advantages"].flatten().tolist() == [0.5] * 4 + [0.0] * 4 + [0.5] * 8


def test_dynamic_sampling_replaces_groups_whose_other_scores_are_equal():
    groups = GroupFilter(FilterGroupsConfig(enable=True, max_batches=1), 4)
    uid = {"uid": [row // 4 for row in range(16)]}
    batch = DataProto.from_dict({"row": torch.arange(16)}, uid)
    scores = torch.tensor([[score or 0.0] for score in SCORES])
    groups.add(batch, Reward(scores, scored=[score is not None for score in SCORES]))
    chosen, metrics = groups.batch()
    assert chosen.batch["row"].tolist() == [*range(8, 16), *range(8)]
    assert metrics["dynamic_sampling/prompts_filled"] == 2.0
    assert groups.without_signal().tolist() == [True, True, False, False]


def test_validation_is_over_the_responses_with_a_score():
    scores = torch.tensor([[1.0], [0.0], [0.0], [0.0], [1.0], [0.0]])
    reward = Reward(scores, answers=["a", "b", "b", "a", "b", "b"], scored=[True, True, False, False, True, True])
    metrics = validation_metrics(reward, 2)
    assert metrics["held_out/score"] == 0.5 == metrics["held_out/mean_at_2"]
    assert metrics["held_out/best_at_2"] == 1.0 and metrics["held_out/maj_at_2"] == 1.0
    assert metrics["held_out/unscored"] == pytest.approx(1 / 3)
    nothing = validation_metrics(Reward(scores, scored=[False] * 6), 2)
    assert nothing == {"held_out/unscored": 1.0}
