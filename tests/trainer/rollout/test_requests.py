"""Requests of episodes and clients: their seeds, temperatures and limits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.local import LocalWorkerGroup
from mcontroller.ray.class_with_init import ClassWithInitArgs
from tests.trainer import sliced
from tests.trainer.rollout.engine import EOS, PROMPT, RESPONSE, SAMPLING, Formula, Tools, a_rollout, whole
from tests.trainer.rollout.server.test_chat_server import Agent, Characters, with_urllib
from tests.trainer.sliced import SlicedActor, sliced_config, sliced_trainer
from trainer import Role, Trajectory, TrajectoryRollout
from trainer.rollout.episodes import Episodes
from trainer.rollout.seeds import seed_of
from trainer.rollout.server.chat_server import ChatServer
from trainer.rollout.trajectories import trajectory_batch
from workers.columns import HELD_OUT_BATCH

ASK = [{"role": "user", "content": "2 + 3?"}]


class Seeded(Formula):
    """A ``Formula`` that counts the batches that it has sampled."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.calls = seed, 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generation_limits(self) -> dict[str, Any]:
        return {**super().generation_limits(), "n": 2, "seed": self.seed}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sampling_state(self) -> dict[str, int]:
        return {"sampled_batches": self.calls}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_sampling(self, state: dict[str, int]) -> None:
        self.calls = state["sampled_batches"]


def seeded(seed: int = 0) -> Any:
    return LocalWorkerGroup(ClassWithInitArgs(Seeded, seed), name_prefix="formula")


def sample(group: Any, episodes: Episodes | None = None, **meta_info: Any) -> list[list[int]]:
    """Responses of episodes to three equal problems."""
    ids = torch.full((3, PROMPT), 11)
    problems = DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    problems.meta_info = {**SAMPLING, **meta_info}
    batch = (episodes or Episodes(Tools, processes=0))(problems, group.generate_sequences)
    return batch.batch["responses"].tolist()


def test_samples_of_episodes_follow_the_seed_of_the_rollout() -> None:
    made: dict[int, list[Any]] = {}
    for seed in (0, 0, 7):
        made.setdefault(seed, []).append(sample(seeded(seed)))
    assert made[0][0] == made[0][1] != made[7][0]
    assert len({str(row) for row in made[0][0]}) > 3


def test_held_out_samples_of_episodes_do_not_change_those_of_training() -> None:
    one, other = seeded(), seeded()
    first = sample(one)
    held_out = [sample(one, **{HELD_OUT_BATCH: number}) for number in (0, 1, 0)]
    second = sample(one)
    assert [sample(other), sample(other)] == [first, second]
    assert held_out[0] == held_out[2] and len({str(each) for each in (first, second, *held_out)}) == 4


def test_samples_ahead_of_training_follow_the_seed_of_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(seed: int, name: str) -> torch.Tensor:
        class Actor(SlicedActor):
            @register(dispatch_mode=Dispatch.ONE_TO_ALL)
            def generation_limits(self) -> dict[str, int]:
                return {**super().generation_limits(), "seed": seed}

        monkeypatch.setattr(sliced, "SLICED", {Role.Actor: Actor, Role.Rollout: Actor})
        trainer, _ = sliced_trainer(sliced_config(2, tmp_path / name))
        with trainer:
            trainer.fit()
            return trainer.actor.workers[0].table.clone()

    first, second, other = table(0, "first"), table(0, "second"), table(1, "other")
    assert first.equal(second) and not first.equal(other)


def test_prompts_and_branches_of_an_episode_get_distinct_responses() -> None:
    made: list[Trajectory] = []

    async def episode(rollout: Any, problem: Mapping[str, Any]) -> Trajectory:
        made[:] = [await rollout.submit(Trajectory(problem["prompt_ids"])) for _ in range(4)]
        stem = await rollout.submit(problem["prompt_ids"], max_tokens=1)
        branches = [copy.deepcopy(stem) for _ in range(4)]
        made.extend([await rollout.submit(each) for each in branches])
        return branches[2]

    episodes = Episodes(episode, processes=0)
    episodes.connect(a_rollout())
    future = episodes.start({"prompt_ids": [10, 20]}, seed=5)
    episodes.run()
    assert future.result().tokens == made[6].tokens
    assert len({each.tokens[1:].tobytes() for each in made}) == 8


def test_a_seed_that_an_agent_asks_for_is_mixed_with_that_of_its_episode() -> None:
    async def episode(rollout: Any, problem: Mapping[str, Any]) -> Trajectory:
        first, second = [await rollout.submit([10, 20], seed=42) for _ in range(2)]
        assert first.tokens == second.tokens
        return first

    episodes = Episodes(episode, processes=0)
    episodes.connect(a_rollout())
    futures = [episodes.start({"prompt_ids": [10, 20]}, seed=seed) for seed in range(4)]
    episodes.run()
    assert len({each.result().seed for each in futures}) == 4


def test_equal_numbers_of_two_purposes_have_different_seeds() -> None:
    seeds = [seed_of(*each) for each in ((0, "training", 1, 2), (0, "held_out", 1, 2), (1, "training", 1, 2))]
    assert len({*seeds}) == 3 and all(-(2**63) <= each < 2**63 for each in seeds)


def test_the_limit_of_a_request_is_no_truncation() -> None:
    rollout = a_rollout(driven=False)
    seed = next(seed for seed in range(99) if EOS not in whole([10, 20], seed)[:5])
    settings = ({"max_tokens": 5}, {"response_length": 5})
    limited, cut = (rollout.submit([10, 20], seed=seed, **each).result() for each in settings)
    assert (limited.ended, cut.ended) == ("max_tokens", "length") and limited.tokens == cut.tokens
    rows = trajectory_batch([limited, cut], prompt_length=PROMPT, response_length=RESPONSE, pad_token_id=0)
    assert rows["truncated"].tolist() == [False, True]


def test_a_limit_beyond_the_room_is_truncation() -> None:
    made = Trajectory([10, 20])
    made.replied([4] * (RESPONSE - 3))
    assert a_rollout(driven=False).submit(made, seed=1, max_tokens=10**9).result().ended == "length"


@pytest.fixture
def server() -> Any:
    group = LocalWorkerGroup(ClassWithInitArgs(Agent), name_prefix="agent")
    served = ChatServer(TrajectoryRollout(group, eos_token_id=EOS, pad_token_id=0), Characters())
    yield served
    served.close()


def test_max_tokens_of_a_client_ends_its_turn_and_truncates_nothing(server: Any) -> None:
    session = server.open("a")
    assert with_urllib(server.base_url, session.api_key, messages=ASK, max_tokens=5)["finish_reason"] == "length"
    (made,) = session.close()
    assert (made.ended, len(made.tokens)) == ("max_tokens", 5)


def test_sessions_of_a_server_have_distinct_seeds(server: Any) -> None:
    sessions = [server.open(f"s{number}") for number in range(4)]
    for session in sessions:
        with_urllib(server.base_url, session.api_key, messages=ASK)
    assert len({session.close()[0].seed for session in sessions}) == 4


def test_a_seed_of_a_client_is_that_of_its_trajectory(server: Any) -> None:
    session = server.open("a")
    with_urllib(server.base_url, session.api_key, messages=ASK, top_p=0, seed=3)
    assert session.close()[0].seed == 3


def test_a_batch_with_scores_of_the_engine_is_not_called_the_policys() -> None:
    class Mixed(Formula):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
        def generate_sequences(self, prompts: DataProto) -> DataProto:
            made = super().generate_sequences(prompts)
            if prompts.meta_info.get("temperature", 1.0) != 1.0:
                made.batch["engine_log_probs"] = made.batch.pop("rollout_log_probs")
            return made

    group = LocalWorkerGroup(ClassWithInitArgs(Mixed), name_prefix="formula")
    rollout = TrajectoryRollout(group, **SAMPLING)
    names = "rollout_log_probs", "engine_log_probs", "engine_log_probs"
    for settings, name in zip(({}, {"temperature": 0.5}, {}), names, strict=True):
        rollout.submit([10, 20], **settings).result()
        assert rollout.log_probs == name


def test_a_batch_has_the_temperature_of_each_token() -> None:
    made = Trajectory([1])
    made.sampled([3, 4], [-1.0, -1.0], temperature=0.5)
    batch = trajectory_batch([made], prompt_length=1, response_length=3, pad_token_id=0)
    assert batch["token_temperatures"].tolist() == [[0.5, 0.5, 1.0]]
