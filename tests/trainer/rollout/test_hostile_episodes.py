"""Episodes that ask for anything: each costs its trajectory, is counted, and changes nothing for the others."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mcontroller.errors import DataError
from tests.trainer.rollout.engine import CALL, PROMPT, RESPONSE, VOCAB, Tools, a_rollout, next_token
from trainer import Trajectory
from trainer.rollout.episode_loop import EpisodeLoop
from trainer.rollout.episodes import EpisodeError, Episodes

HUGE = 10**5000
GOOD = [10, 20]

SETTINGS: list[dict[Any, Any]] = [
    *({"temperature": value} for value in (-1, float("nan"), True, "0.5", [1.0], HUGE, object())),
    *({"top_p": value} for value in (-0.1, 1.01, float("nan"), "0.9", HUGE)),
    *({"top_k": value} for value in (-1, 1.5, True, HUGE)),
    *({"min_p": value} for value in (-1e-3, "0.1")),
    *({"repetition_penalty": value} for value in (0, "1.1")),
    {"do_sample": 1},
    *({"seed": value} for value in (2**63, 1.5, "7")),
    *({"response_length": value} for value in ("x", 0, 2.5)),
    *({"max_tokens": value} for value in ("x", 0, 1.5)),
    *({name: 1} for name in ("temprature", "prompt", "")),
    *({"eos_token_id": value} for value in ("x", VOCAB, -1, [None])),
    *({"pad_token_id": value} for value in ("x", VOCAB, [])),
    *({"stop_token_ids": value} for value in ([VOCAB], ["a"], "ab", [HUGE], [True])),
]
PROMPTS: list[Any] = [
    *([], [1.5], [-1], [VOCAB], [HUGE], "text", None, [[1]], {"a": 1}, 7),
    *([1] * (PROMPT + 1), Trajectory([VOCAB]), Trajectory([1], tokens=[3], mask=[1]), Trajectory([1], tokens=[3])),
]


def hostile(ask: Callable[[Any], Any]) -> Callable[..., Any]:
    async def episode(rollout: Any, problem: Mapping[str, Any]) -> Any:
        return await ask(rollout) if problem["hostile"] else await Tools()(rollout, problem)

    return episode


def run(episode: Callable[..., Any], **options: Any) -> tuple[Any, dict[str, float]]:
    """The result of a hostile episode between two others, whose tokens are compared, and the metrics."""
    episodes = Episodes(episode, processes=0, timeout_s=0.5)
    episodes.connect(a_rollout(**options))
    try:
        problems = [{"prompt_ids": GOOD, "hostile": hostile} for hostile in (False, True, False)]
        futures = [episodes.start(problem, seed=row) for row, problem in enumerate(problems)]
        episodes.run()
        actual: list[Any] = [each.exception() or each.result() for each in futures]
        for seed in (0, 2):
            assert isinstance(actual[seed], Trajectory) and actual[seed].tokens.tolist() == of_tools(seed)
        failed = [Trajectory([1], ended=each.kind) if isinstance(each, EpisodeError) else each for each in actual]
        return actual[1], episodes.take_metrics(failed)
    finally:
        episodes.close()


def of_tools(seed: int) -> list[int]:
    tokens, turns = list[int](), 1
    while True:
        tokens.append(next_token([*GOOD, *tokens], seed, len(tokens)))
        if tokens[-1] == 1 or len(tokens) == RESPONSE:
            return tokens
        if tokens[-1] == CALL:
            if turns > 3 or len(tokens) + 2 >= RESPONSE:
                return tokens
            tokens += [50, 50 + turns]
            turns += 1


def check_failed(found: Any, metrics: Mapping[str, float]) -> None:
    assert isinstance(found, EpisodeError), found
    assert metrics["episodes/failed"] == 1.0 == metrics[f"episodes/{found.kind}"]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ", ".join(settings))
def test_a_request_with_a_wrong_setting_costs_its_trajectory(settings: dict[Any, Any]) -> None:
    check_failed(*run(hostile(lambda rollout: rollout.submit(GOOD, **settings))))


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: type(prompt).__name__)
def test_a_request_with_a_wrong_prompt_costs_its_trajectory(prompt: Any) -> None:
    check_failed(*run(hostile(lambda rollout: rollout.submit(prompt))))


def test_an_error_of_a_setting_has_its_field_and_the_nearest_name() -> None:
    rollout = a_rollout()
    for field, value in (("temperature", -1), ("seed", 2**63), ("top_k", 1.5), ("response_length", "x")):
        with pytest.raises(DataError) as caught:
            rollout.submit(GOOD, **{field: value})
        assert (caught.value.field, caught.value.value) == (field, value)
    with pytest.raises(DataError) as caught:
        rollout.submit(GOOD, temprature=0.5)
    assert caught.value.value == 0.5
    assert caught.value.field == "temprature" and len(rollout) == 0


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_p": 0.0}, {"do_sample": False}])
def test_greedy_requests_are_legal_unless_they_are_trained_on(settings: dict[str, Any]) -> None:
    episode = hostile(lambda rollout: rollout.submit(GOOD, **settings))
    check_failed(*run(episode, trained=True))
    made, metrics = run(episode)
    assert made.temperatures.tolist() == [0.0] * len(made.tokens) and metrics["episodes/failed"] == 0.0


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("not to be sent")


class Exits:
    """Ends the interpreter that reads it, if nothing stops it."""

    def __reduce__(self) -> Any:
        return sys.exit, (4,)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def changed(**changes: Any) -> Callable[[Any], Any]:
    """Return what the engine made, with other values."""

    async def ask(rollout: Any) -> Any:
        made = await rollout.submit(GOOD)
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    return ask


async def replies_outside_of_the_vocabulary(rollout: Any) -> Any:
    made = await rollout.submit(GOOD, max_tokens=3)
    made.replied([VOCAB])
    return made


async def changes_what_is_in_flight(rollout: Any) -> Any:
    made = Trajectory(GOOD)
    future = rollout.submit(made)
    made.tokens = "text"  # type: ignore[assignment]
    return await future


async def submits_twice(rollout: Any) -> Any:
    made = Trajectory(GOOD)
    first = rollout.submit(made)
    with pytest.raises(DataError):
        rollout.submit(made)
    await first
    raise ValueError("as expected")


async def cancels_itself(rollout: Any) -> Any:
    raise asyncio.CancelledError


async def exits_in_a_task(rollout: Any) -> Any:
    async def leave() -> None:
        sys.exit(3)

    return await asyncio.gather(asyncio.create_task(leave()))


def raises(error: BaseException) -> Callable[[Any], Any]:
    async def ask(rollout: Any) -> Any:
        raise error

    return ask


def sends(*values: Any) -> Callable[[Any], Any]:
    """Send a message of its own, and wait."""

    async def ask(rollout: Any) -> Any:
        loop: EpisodeLoop = rollout._loop
        kind, *others = values
        loop._send(kind, rollout._number, *others)
        await asyncio.sleep(1000)

    return ask


MADE = Trajectory(GOOD, tokens=[3], mask=[0], log_probs=[0.0], versions=[-1])
BEHAVIORS: dict[str, Callable[[Any], Any]] = {
    "tokens are floats": changed(tokens=array("d", [1.5])),
    "mask is 7": changed(mask=array("b", [7] * 3), tokens=array("q", [3] * 3)),
    "prompt is None": changed(prompt=None),
    "turns is text": changed(turns="many"),
    "turn is negative": changed(turn=-1),
    "problem cannot be sent": changed(problem={"a": Unpicklable()}),
    "problem ends its reader": changed(problem={"a": Exits()}),
    "has no text": raises(Mute()),
    "exits": raises(SystemExit(3)),
    "recursion": raises(RecursionError()),
    "vocabulary": replies_outside_of_the_vocabulary,
    "in flight": changes_what_is_in_flight,
    "twice": submits_twice,
    "cancels": cancels_itself,
    "task": exits_in_a_task,
    "unknown message": sends("hello"),
    "empty submit": sends("submit"),
    "request is nan": sends("submit", float("nan"), "text", {}),
    "no options": sends("submit", 0, MADE, None),
    "names are numbers": sends("submit", 0, Trajectory(GOOD), {5: 1}),
    "cancel nothing": sends("cancel"),
    "end with nothing": sends("end"),
    "end with others' tokens": sends("end", dataclasses.replace(MADE, mask=[1])),
    "raised nothing": sends("raised"),
    "stopped": sends("stopped"),
}


@pytest.mark.parametrize("behavior", BEHAVIORS.values(), ids=BEHAVIORS)
def test_an_episode_that_does_anything_costs_its_trajectory(behavior: Callable[[Any], Any]) -> None:
    check_failed(*run(hostile(behavior)))
