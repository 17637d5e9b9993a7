"""Episodes with tools: their tokens, where they run, and what becomes of those that misbehave."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import struct
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcontroller.errors import ConfigError
from tests.trainer.rollout.engine import CALL, RESPONSE, Tools, a_rollout, next_token, whole
from trainer import Trajectory
from trainer.rollout.episode_loop import EpisodeLoop, serve_episodes
from trainer.rollout.episodes import PATIENCE_S, EpisodeError, Episodes, _Host, outcome_columns
from trainer.rollout.trajectory_log import Taken, read, write
from workers.generate.engine_protocol import Sampled

TOOLS = "tests.trainer.rollout.engine:Tools"
PROMPTS = [[10 + row, 20, 3 * row + 1][: 1 + row % 3] for row in range(12)]


def run(kinds: Mapping[int, str], **options: Any) -> tuple[list[Trajectory | EpisodeError], dict[str, float]]:
    """The trajectories or errors of one episode for each prompt, and the metrics."""
    episodes = Episodes(TOOLS if options.get("processes") else Tools, {"turns": 3}, **options)
    episodes.connect(a_rollout())
    try:
        problems = [{"prompt_ids": prompt, "kind": kinds.get(row, "")} for row, prompt in enumerate(PROMPTS)]
        futures = [episodes.start(problem, seed=row) for row, problem in enumerate(problems)]
        episodes.run()
        found: list[Any] = [each.exception() or each.result() for each in futures]
        made = [Trajectory([1], ended=each.kind) if isinstance(each, EpisodeError) else each for each in found]
        return found, episodes.take_metrics(made)
    finally:
        episodes.close()


def expected(prompt: list[int], seed: int) -> Trajectory:
    """What the episode makes, token by token."""
    made = Trajectory(list(prompt))
    while True:
        token = next_token([*made.prompt, *made.tokens], seed, len(made.tokens))
        made.sampled([token], [-token / 100])
        if token == 1 or len(made.tokens) == RESPONSE:
            return made
        if token == CALL:
            if made.turns > 3 or len(made.tokens) + 2 >= RESPONSE:
                return made
            made.replied([50, 50 + made.turns])


@pytest.mark.processes
def test_processes_start_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each import waits for that of the other process."""
    monkeypatch.setenv("STARTING", f"{os.getpid()} {tmp_path}")
    (tmp_path / "meets.py").write_text(
        "import os, pathlib, time\n"
        "pid, folder = os.environ['STARTING'].split()\n"
        "if os.getpid() != int(pid):\n"
        "    pathlib.Path(folder, f'{os.getpid()}.began').touch()\n"
        "    while len(list(pathlib.Path(folder).glob('*.began'))) < 2:\n"
        "        time.sleep(0.01)\n"
        "async def episode(rollout, problem):\n"
        "    return await rollout.submit(problem['prompt_ids'])\n"
    )
    episodes = Episodes(f"{tmp_path / 'meets.py'}:episode", processes=2)
    episodes.connect(a_rollout())
    episodes.start_processes()
    assert len(list(tmp_path.glob("*.began"))) == 2
    future = episodes.start({"prompt_ids": [3]}, seed=1)
    episodes.run()
    assert future.result().tokens and len(list(tmp_path.glob("*.began"))) == 2
    episodes.close()


def test_an_episode_has_exactly_the_tokens_of_engine_and_tools() -> None:
    found, metrics = run({}, processes=0, concurrency=5)
    for seed, (made, prompt) in enumerate(zip(found, PROMPTS, strict=True)):
        right = expected(prompt, seed)
        assert isinstance(made, Trajectory)
        assert (made.tokens, made.mask, made.turns) == (right.tokens, right.mask, right.turns)
        assert made.log_probs == pytest.approx(right.log_probs) and made.versions == right.versions
    assert not any(count for name, count in metrics.items() if name.startswith("episodes"))
    assert max(each.turns for each in found) == 4  # type: ignore[union-attr]


MISBEHAVIORS = {
    "raises": "raised",
    "forges": "invalid",
    "claims": "invalid",
    "endless": "invalid",
    "text": "invalid",
    "tokenless": "invalid",
    "waits": "timed_out",
}


def test_an_episode_that_misbehaves_costs_its_trajectory_alone() -> None:
    outcomes, metrics = run(dict(enumerate(MISBEHAVIORS, 2)), processes=0, timeout_s=0.2)
    for row, made in enumerate(outcomes):
        if 2 <= row < 2 + len(MISBEHAVIORS):
            assert isinstance(made, EpisodeError) and made.kind == [*MISBEHAVIORS.values()][row - 2]
        else:
            assert isinstance(made, Trajectory) and made.tokens == expected(PROMPTS[row], row).tokens
    assert {name: count for name, count in metrics.items() if name.startswith("episodes")} == {
        "episodes/failed": 7.0,
        "episodes/raised": 1.0,
        "episodes/timed_out": 1.0,
        "episodes/died": 0.0,
        "episodes/invalid": 5.0,
        "episodes/restarted": 0.0,
        "episodes/replaced_processes": 0.0,
    }


@pytest.mark.processes
def test_processes_that_block_or_end_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.rollout.episodes.GRACE_S", 0.2)
    found, metrics = run({1: "blocks", 4: "exits"}, processes=2, timeout_s=1.0)
    assert [error.kind for error in (found[4], found[1]) if isinstance(error, EpisodeError)] == ["died", "timed_out"]
    for row in set(range(len(PROMPTS))) - {1, 4}:
        made, right = found[row], expected(PROMPTS[row], row)
        assert isinstance(made, Trajectory) and (made.tokens, made.mask) == (right.tokens, right.mask)
    assert metrics["episodes/failed"] == 2.0 and metrics["episodes/died"] == metrics["episodes/timed_out"] == 1.0
    assert metrics["episodes/restarted"] >= 3.0 and metrics["episodes/replaced_processes"] >= 2.0


def test_messages_of_both_sides_that_a_pipe_does_not_hold_wait_for_no_other() -> None:
    ours, theirs = Pipe()
    with socket.fromfd(ours.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 10, 0))
    serving = threading.Thread(target=serve_episodes, args=(os.dup(theirs.fileno()),), daemon=True)
    serving.start()
    ours.send((TOOLS, {}, None))
    assert ours.recv() is None
    for number in range(4):  # each episode submits its prompt, which nobody reads yet
        ours.send(("start", number, {"prompt_ids": [5] * 100_000}, 0, RESPONSE))
    assert [ours.recv()[:2] for _ in range(4)] == [("submit", number) for number in range(4)]
    ours.close()
    theirs.close()
    serving.join(10)
    assert not serving.is_alive()


def test_time_in_which_the_controller_does_something_else_is_not_that_of_the_episodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def uses_a_tool(rollout: Any, problem: Mapping[str, Any]) -> Trajectory:
        made: Trajectory = await rollout.submit(problem["prompt_ids"])
        await asyncio.sleep(3 * PATIENCE_S)
        return made

    seconds = iter(range(0, 10**6, 1000))  # of validation, between two looks at the clock
    monkeypatch.setattr("trainer.rollout.episodes.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    episodes = Episodes(uses_a_tool, processes=0, timeout_s=60.0)
    episodes.connect(a_rollout())
    future = episodes.start({"prompt_ids": [10, 20]}, seed=5)
    episodes.run()
    assert future.result().tokens.tolist() == whole([10, 20], 5)


def test_those_that_have_begun_can_end_before_others_begin() -> None:
    episodes = Episodes(Tools, processes=0, concurrency=2)
    rollout = a_rollout()
    episodes.connect(rollout)
    futures = [episodes.start({"prompt_ids": prompt}, seed=row) for row, prompt in enumerate(PROMPTS[:5])]
    episodes.pump()
    episodes.begins = False
    while len(rollout) or episodes.busy:
        rollout.advance()
        episodes.pump()
    assert [future.done() for future in futures] == [True, True, False, False, False]
    episodes.begins = True
    episodes.run()
    right = [expected(prompt, row).tokens for row, prompt in enumerate(PROMPTS[:5])]
    assert [future.result().tokens for future in futures] == right


def test_an_error_of_an_engine_without_a_pickle_is_that_of_its_episode() -> None:
    class Refused(OSError):
        def __init__(self, *, url: str) -> None:
            super().__init__(f"{url} is refused")

    class Refusing:
        name = "refusing"

        async def generate(self, *_: Any) -> Sampled:
            raise Refused(url="http://engine")

        async def close(self) -> None: ...

    episodes = Episodes(Tools, processes=0)
    episodes.connect(a_rollout(engines=[Refusing()]))
    future = episodes.start({"prompt_ids": [3]}, seed=0)
    episodes.run()
    error = future.exception()
    assert isinstance(error, EpisodeError) and error.kind == "raised" and "http://engine" in str(error)


def test_a_process_lost_at_any_message_neither_loses_nor_repeats_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes are simulated: each is lost instead of a message to or from it, at every message in turn."""
    count = failing = 0
    made: list[int] = []

    class Dying(_Host):
        def send(self, message: tuple[Any, ...]) -> None:
            self.count("send")
            super().send(message)

        def receive(self) -> list[tuple[Any, ...]]:
            messages = super().receive()
            self.count("receive") if messages else None
            return messages

        def count(self, way: str) -> None:
            nonlocal count
            count += 1
            if count == failing:
                raise BrokenPipeError if way == "send" else EOFError

    sampled = Trajectory.sampled

    def count_sampled(trajectory: Trajectory, tokens: Any, *others: Any) -> None:
        made.append(len(tokens))
        sampled(trajectory, tokens, *others)

    monkeypatch.setattr(Episodes, "_process", lambda episodes: Dying(episodes._loop))
    monkeypatch.setattr(Trajectory, "sampled", count_sampled)
    right = [expected(prompt, row) for row, prompt in enumerate(PROMPTS)]
    total, failing = 1, 0
    while failing <= total:
        count, _ = 0, made.clear()
        found, metrics = run({}, processes=2, concurrency=5)
        total = total if failing else count
        assert [(each.tokens, each.mask, each.versions) for each in found] == [  # type: ignore[union-attr]
            (each.tokens, each.mask, each.versions) for each in right
        ], failing
        assert sum(made) == sum(sum(each.mask) for each in right), failing
        assert metrics["episodes/failed"] == 0.0 and (metrics["episodes/restarted"] > 0) == (failing > 0)
        failing += 1
    assert total > 50


def test_an_episode_that_begins_again_may_ask_for_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    received = 0

    class DyingOnce(_Host):
        def receive(self) -> list[tuple[Any, ...]]:
            nonlocal received
            received += 1
            messages = super().receive()
            if received == 2:  # its turns are in flight
                raise EOFError
            return messages

    async def differs(rollout: Any, problem: Mapping[str, Any]) -> Trajectory:
        begun[problem["row"]] += 1
        made: Trajectory = await rollout.submit([*problem["prompt_ids"], begun[problem["row"]]])
        return made

    begun = [0] * 4
    monkeypatch.setattr(Episodes, "_process", lambda episodes: DyingOnce(episodes._loop))
    episodes = Episodes(differs, processes=0)
    episodes.processes, episodes._hosts = 1, []
    rollout = a_rollout()
    episodes.connect(rollout)
    futures = [episodes.start({"prompt_ids": [10], "row": row}, seed=7) for row in range(4)]
    episodes.run()
    assert [future.result(0).prompt.tolist() for future in futures] == [[10, 2]] * 4
    assert futures[0].result().tokens.tolist() == whole([10, 2], 7) and len(rollout) == 0


def test_an_answer_to_a_request_that_was_cancelled_is_ignored() -> None:
    async def cancels(rollout: Any, problem: Mapping[str, Any]) -> Any:
        waiting = problem["waiting"] = rollout.submit([3])
        await asyncio.sleep(1000)
        return await waiting

    problem: dict[str, Any] = {}
    loop = EpisodeLoop(cancels, None, lambda message: None)
    loop.handle(("start", 1, problem, 0, RESPONSE))
    loop.run(0.01)
    problem["waiting"].cancel()
    columns = {"tokens": [4], "log_probs": [0.0], "versions": [0], "temperatures": [1.0]}
    loop.handle(("made", 1, 0, (columns, "stop")))
    loop.close()
    assert problem["waiting"].cancelled()


def test_functions_that_cannot_be_episodes_are_rejected() -> None:
    for episode, options, key in (
        (lambda rollout, problem: None, {}, "multi_turn.episode"),
        (Tools, {"turn": 3}, "multi_turn.options"),
    ):
        with pytest.raises(ConfigError) as caught:
            Episodes(episode, options, processes=0)
        assert caught.value.key == key
    with pytest.raises(ConfigError) as caught:
        Episodes(Tools, processes=2)
    assert caught.value.key == "multi_turn.episode"


def test_episodes_without_a_rollout_say_what_is_missing() -> None:
    async def episode(rollout: Any, problem: Mapping[str, Any]) -> Trajectory:
        return await rollout.submit(problem["prompt_ids"])

    with pytest.raises(ConfigError) as caught:
        Episodes(episode, processes=0).start({"prompt_ids": [1]}, seed=0)
    assert caught.value.key == "rollout"


async def scored_episode(rollout: Any, problem: Mapping[str, Any]) -> Trajectory:
    """Set the outcome of the problem."""
    made: Trajectory = await rollout.submit(problem["prompt_ids"])
    made.score, made.metrics = problem["outcome"]
    return made


def test_scores_and_metrics_of_episodes_are_those_of_their_responses(tmp_path: Path) -> None:
    outcomes: list[Any] = [(2, {"steps": 3}), (np.float32(0.5), {}), (None, {"steps": 1.0}), (1, {"steps": "many"})]
    outcomes += [(math.nan, {}), ("good", {}), (1.0, 5)]
    outcomes += [("", {}), ([], {}), (np.ones(2), {}), (10**5000, {}), (1.0, {"steps": 10**400})]
    episodes = Episodes(scored_episode, processes=0)
    episodes.connect(a_rollout())
    futures = [episodes.start({"prompt_ids": [9], "outcome": outcome}, seed=3) for outcome in outcomes]
    episodes.run()
    made = [future.result() for future in futures[:3]]
    assert [(response.score, response.metrics) for response in made] == [
        (2.0, {"steps": 3.0}),
        (0.5, {}),
        (None, {"steps": 1.0}),
    ]
    assert [future.exception().kind for future in futures[3:]] == ["invalid"] * 9  # type: ignore[union-attr]
    assert episodes.take_metrics(made)["environment/steps"] == 2.0
    failed = Trajectory([9], ended="raised")
    columns = outcome_columns([*made, failed])
    assert columns["failed"].tolist() == [False, False, False, True]
    assert columns["episode_scores"].tolist() == pytest.approx([2.0, 0.5, math.nan, math.nan], nan_ok=True)
    write(tmp_path / "0.npz", Taken([0], [0], made, 0))
    read_again = read(tmp_path / "0.npz").responses
    assert [(one.score, one.metrics) for one in read_again] == [(one.score, one.metrics) for one in made]
