"""Weights move under requests in flight: each token has the log-probability of the policy of its version."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import openai
import pytest

from mcontroller import DataProto, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from tests.trainer.rollout.server.test_chat_server import ASK, END, Characters
from tests.vllm.policies import EOS, PAD, PROMPT, VOCAB, Actor, actor_config, prompts
from tests.vllm.test_vllm_rollout import GREEDY, TOLERANCE, update
from trainer import Submitted, Trajectory, TrajectoryRollout
from trainer.rollout.episodes import Episodes
from trainer.rollout.server.chat_server import AgentEpisode, ChatServer
from trainer.rollout.trajectories import trajectory_batch

TRAJECTORIES, RESPONSE, UPDATES = 200, 90, 2
CALLS = range(3, 8)  # tokens that call a tool


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[MegatronRayWorkerGroup]:
    config = actor_config("dense-tp2", parallel={"tp": 1}, rollout={"response_length": RESPONSE})
    created = RayClassWithInitArgs(Actor, config, role="actor_rollout")
    with (
        RayResourcePool([1], use_gpu=False, name_prefix="flying", max_colocate_count=1) as pool,
        MegatronRayWorkerGroup(pool, created, name_prefix="flying") as started,
    ):
        started.init_model()
        yield started


def test_tokens_in_flight_have_the_log_probs_of_their_versions(group: MegatronRayWorkerGroup) -> None:
    draws = random.Random(7)
    trained = group.generate_sequences(prompts(**GREEDY))
    rollout = TrajectoryRollout(group, driven=True, eos_token_id=EOS, pad_token_id=PAD)
    made, in_flight, stopped, flying = [], [], [], list[Submitted]()

    def send(prompt: list[int] | Trajectory, length: int, **options: Any) -> Trajectory:
        flying.append(rollout.submit(prompt, response_length=length, stop_token_ids=CALLS, **options))
        flying[-1].key = length
        return flying[-1].trajectory

    def submit() -> None:
        length = draws.randint(RESPONSE // 2, RESPONSE)
        prompt = [draws.randrange(3, VOCAB) for _ in range(draws.randint(3, 40))]
        made.append(send(prompt, length, stream=len(made) % 4 == 0))

    def take() -> None:
        assert rollout.start()
        rollout.take()
        for ended in [each for each in flying if each.done()]:
            flying.remove(ended)
            trajectory = ended.trajectory
            if trajectory.ended == "turn" and len(trajectory.tokens) + 2 < ended.key:
                trajectory.replied([draws.randrange(3, VOCAB), 3])  # what a tool returned
                send(trajectory, ended.key)
            elif len(stopped) < UPDATES:
                submit()

    for _ in range(TRAJECTORIES):
        submit()
    for version in range(UPDATES):
        while sum(bool(it.ended) and version in it.versions for it in made) < TRAJECTORIES // 10:
            take()
        update(group, trained)
        in_flight.append(len(rollout))
        start = time.perf_counter()
        group.update_engine()
        stopped.append(time.perf_counter() - start)
    while rollout.start():
        take()
    columns = trajectory_batch(made, prompt_length=PROMPT, response_length=RESPONSE, pad_token_id=PAD)
    scored = group.compute_log_prob(DataProto.from_dict(columns, meta_info={"temperature": 1.0}))
    away = (scored.batch["old_log_probs"] - columns["rollout_log_probs"]).abs()
    versions = columns["token_versions"]
    present, older = (float(away[some].max()) for some in (versions == UPDATES, (versions >= 0) & (versions < UPDATES)))
    print("in flight at the updates:", in_flight, "seconds:", stopped, "differences:", present, older)  # noqa: T201
    assert min(in_flight) > TRAJECTORIES // 2
    assert sum(len({*trajectory.versions} - {-1}) > 1 for trajectory in made) > TRAJECTORIES // 4
    assert sum(trajectory.turns > 1 for trajectory in made) > TRAJECTORIES // 8
    assert {version for trajectory in made for version in trajectory.versions} == {-1, *range(UPDATES + 1)}
    assert present < TOLERANCE
    assert older > 100 * TOLERANCE  # another policy would be noticed
    assert rollout.router is not None and not rollout.router.lost


def test_requests_in_flight_end_before_the_weights_move_or_their_rest_is_sent_again(
    group: MegatronRayWorkerGroup,
) -> None:
    several = {}
    trained = group.generate_sequences(prompts(**GREEDY))
    rollout = TrajectoryRollout(group, eos_token_id=EOS, pad_token_id=PAD)
    for pause, count in (("wait", 100), ("abort", 300)):  # more than an engine has rows: some are ended without a token
        group.set_pause(pause)
        made, is_updated = list[Submitted](), threading.Event()

        def submit(*_: Any, made: list[Submitted] = made, is_updated: threading.Event = is_updated) -> None:
            if not is_updated.is_set():  # the engine has requests all the time, however long the training takes
                made.append(rollout.submit([3 + len(made) % 100, 4], temperature=1.0))
                made[-1].add_done_callback(submit)

        for _ in range(count):
            submit()
        update(group, trained)
        group.update_engine()
        is_updated.set()
        several[pause] = sum(len({*submitted.result(300).versions}) > 1 for submitted in [*made])
    assert several["wait"] == 0 < several["abort"]


TURNS = 2


async def read_streams(base_url: str, api_key: str, problem: Mapping[str, Any]) -> list[list[str]]:
    """Return the texts of the events of each turn."""
    messages, texts = [*ASK], list[list[str]]()
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in range(TURNS):
            stream = await client.chat.completions.create(
                model="policy", messages=messages, stream=True, max_tokens=30, seed=5
            )
            texts.append([chunk.choices[0].delta.content or "" async for chunk in stream])
            messages += [{"role": "assistant", "content": "".join(texts[-1])}, {"role": "user", "content": "Why?"}]
    return texts


def conversation(rollout: TrajectoryRollout) -> tuple[Trajectory, list[list[str]]]:
    """Return the trajectory of a conversation, and the texts of its events."""
    texts = list[list[str]]()

    async def agent(*arguments: Any) -> None:
        texts.extend(await read_streams(*arguments))

    if rollout.driven:
        episodes = Episodes(AgentEpisode, {"agent": agent}, tokenizer=Characters(), processes=0)
        episodes.connect(rollout)
        future = episodes.start({"prompt_ids": [5]}, seed=3)
        episodes.run()
        return future.result(), texts
    server = ChatServer(rollout, Characters())
    session = server.open("a")
    asyncio.run(agent(server.base_url, session.api_key, {}))
    (made,) = session.close()
    server.close()
    return made, texts


@pytest.mark.parametrize("in_episode", [False, True])
def test_a_stream_has_the_tokens_of_the_engine_while_it_generates(
    group: MegatronRayWorkerGroup, in_episode: bool
) -> None:
    rollout = TrajectoryRollout(group, driven=in_episode, eos_token_id=END, pad_token_id=PAD)
    most = 0
    for _ in range(20):  # on a busy machine, a whole turn of 30 tokens may be there before it is read
        made, texts = conversation(rollout)
        columns = trajectory_batch([made], prompt_length=PROMPT, response_length=RESPONSE, pad_token_id=PAD)
        scored = group.compute_log_prob(DataProto.from_dict(columns, meta_info={"temperature": 1.0}))
        away = (scored.batch["old_log_probs"] - columns["rollout_log_probs"]) * columns["response_mask"]
        sampled = [token for token, is_sampled in zip(made.tokens, made.mask, strict=True) if is_sampled]
        assert made.turns == len(texts) == TURNS and float(away.abs().max()) < TOLERANCE
        assert "".join(map("".join, texts)) == Characters().decode(sampled)
        most = max(most, *(len([part for part in turn if part]) for turn in texts))
        if most > 1:
            break
    assert most > 1
