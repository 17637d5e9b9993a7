"""Environments of the package verifiers: their tokens and scores, and a run that learns from a rubric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcontroller.errors import ConfigError
from mcontroller.local import LocalWorkerGroup
from mcontroller.ray.class_with_init import ClassWithInitArgs
from mcontroller.ray.resource_pool import ResourcePoolManager
from mcontroller.testing import SimulatedGroupMaker
from tests.trainer.rollout.server.test_apis import ANSWER, tokens_of
from tests.trainer.rollout.server.test_chat_server import CALL, END, Agent, Characters
from trainer import Callback, RayPPOTrainer, TrajectoryRollout
from trainer.config import MultiTurnConfig
from trainer.data.config import DatasetConfig
from trainer.data.sources import load_records
from trainer.run.config import read_run_config
from trainer.run.parts import make_episodes, make_parts

ENVIRONMENT = "tests.verifiers.environment"
pytestmark = pytest.mark.processes  # the package calls uname
pytest.importorskip("verifiers")
EPISODE = "trainer.rollout.verifiers_episode:VerifiersEpisode"


def test_a_rollout_of_an_environment_is_a_trajectory_with_the_reward_of_its_rubric() -> None:
    records = load_records(DatasetConfig(source="verifiers", task=ENVIRONMENT, size=2), "data.train")
    assert [row["answer"] for row in records.rows] == ["5", "6"]
    config = MultiTurnConfig(episode=EPISODE, options={"environment": ENVIRONMENT}, processes=0)
    episodes = make_episodes(config, Characters())
    assert episodes is not None
    group = LocalWorkerGroup(ClassWithInitArgs(Agent), name_prefix="agent")
    episodes.connect(TrajectoryRollout(group, driven=True, eos_token_id=END, pad_token_id=0))
    futures = [episodes.start({"prompt_ids": [5], "record": row}, seed=3) for row in records.rows]
    episodes.run()
    right, wrong = [future.result() for future in futures]
    assert (right.score, wrong.score) == (0.5, 0.0)  # the agent answers 5
    assert right.metrics["tool_results"] == 1.0 and right.metrics["right"] == 1.0
    sampled = [token for token, mark in zip(right.tokens, right.mask, strict=True) if mark]
    assert sampled == tokens_of(CALL) + tokens_of(ANSWER) and right.turns == 2


def test_an_environment_that_is_not_there_is_rejected() -> None:
    for task in (None, "no_such_environment"):
        with pytest.raises(ConfigError) as caught:
            load_records(DatasetConfig(source="verifiers", task=task), "data.train")
        assert caught.value.key == "task"


class Rewards(Callback):
    """Keeps the mean score of every step."""

    def __init__(self) -> None:
        self.means: list[float] = []

    def step_ended(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.means.append(metrics["train/score"])


def test_a_policy_learns_from_the_rubric_of_an_environment(
    simulated_group: SimulatedGroupMaker, tmp_path: Path
) -> None:
    config = read_run_config("examples/environments/config.yaml", ["multi_turn.processes=0"]).within(tmp_path)
    parts, rewards = make_parts(config), Rewards()
    trainer = RayPPOTrainer(
        config,
        parts.tokenizer,
        parts.roles,
        ResourcePoolManager({"pool": [1]}, dict.fromkeys(parts.roles, "pool"), use_gpu=False),
        lambda pool, init, name_prefix: simulated_group(init, 1),
        train_dataset=parts.train,
        rollout_fn=parts.rollout_fn,
        callbacks=[rewards],
    )
    with trainer:
        trainer.init_workers()
        trainer.fit()
    assert sum(rewards.means[-3:]) / 3 > sum(rewards.means[:3]) / 3 + 0.4
