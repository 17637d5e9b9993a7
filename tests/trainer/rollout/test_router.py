"""The router and the trajectories that go through it, with engines of a few lines."""

from __future__ import annotations

import asyncio
import copy
import gc
import socket
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from mcontroller.errors import ConfigError, DataError, WorkerDied
from mcontroller.local import LocalWorkerGroup
from mcontroller.ray.class_with_init import ClassWithInitArgs
from tests.trainer.rollout.engine import EOS, SAMPLING, Formula
from trainer import Trajectory, TrajectoryRollout
from trainer.rollout.episodes import Episodes
from trainer.rollout.reference_engine import ReferenceEngine
from trainer.rollout.requests import BLOCK_TOKENS, UNEVEN, NoEngineLeft, RequestLoop, Router, prefix_blocks
from workers.config import RolloutConfig
from workers.generate.engine_protocol import Engine, EngineLost, RequestFailed, Sampled
from workers.generate.vllm.vllm_engine import VllmAddress

OnPart = Callable[[Sampled], None] | None


class SmallEngine:
    """Answers with the number of the request's tokens when it may; ``version`` changes in the middle of a response."""

    def __init__(self, name: str = "engine") -> None:
        self.name, self.closed = name, False
        self.requests: list[tuple[array[int], Mapping[str, Any]]] = []
        self.cancelled = self.in_flight = 0
        self.go_on: asyncio.Event | None = None
        self.error: Exception | None = None
        self.partial_after: int | None = None

    async def generate(self, prompt: array[int], sampling: Mapping[str, Any], on_part: OnPart = None) -> Sampled:
        self.requests.append((prompt, sampling))
        self.in_flight += 1
        try:
            if self.go_on is not None:
                await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
        if self.error is not None:
            raise self.error
        length = sampling["response_length"]
        if self.partial_after is not None and len(self.requests) == 1:
            made = array("q", [len(prompt)] * self.partial_after)
            return Sampled(made, array("d", [-0.5] * len(made)), [(1, len(made))], is_partial=True)
        tokens = array("q", [*[len(prompt)] * (length - 1), EOS])
        return Sampled(tokens, array("d", [-0.5] * length), [(1, 1), (2, length - 1)])

    async def close(self) -> None:
        self.closed = True


def rollout_with(*engines: Engine, **options: Any) -> TrajectoryRollout:
    group = LocalWorkerGroup(ClassWithInitArgs(Formula))
    return TrajectoryRollout(group, engines=engines, **SAMPLING, **options)


def test_a_request_goes_to_the_engine_that_has_its_prefix_unless_that_has_many_more() -> None:
    async def route() -> None:
        engines = [SmallEngine("a"), SmallEngine("b")]
        for engine in engines:
            engine.go_on = asyncio.Event()
        router = Router(engines)
        prefixes = [array("q", [token] * 2 * BLOCK_TOKENS) for token in (3, 4)]
        tasks = []

        async def submit(prompt: array[int]) -> None:
            tasks.append(asyncio.ensure_future(router.generate(prompt, {"response_length": 2})))
            await asyncio.sleep(0)

        for prefix in prefixes:
            await submit(prefix)
        for turn in range(1, UNEVEN + 1):
            await submit(prefixes[1] + array("q", [5] * turn))
        assert [engine.in_flight for engine in engines] == [1, 1 + UNEVEN]
        await submit(prefixes[1])  # the other one has room
        assert engines[1].in_flight == 2 + UNEVEN
        await submit(prefixes[1])
        assert [engine.in_flight for engine in engines] == [2, 2 + UNEVEN]
        for engine in engines:
            assert engine.go_on is not None
            engine.go_on.set()
        await asyncio.gather(*tasks)

    asyncio.run(route())


def test_the_blocks_of_a_prefix_depend_on_all_tokens_before_them() -> None:
    prompt = array("q", range(3 * BLOCK_TOKENS + 5))
    other = array("q", [9, *prompt[1:]])
    assert len(prefix_blocks(prompt)) == 3 and prefix_blocks(prompt[: 2 * BLOCK_TOKENS]) == prefix_blocks(prompt)[:2]
    assert not {*prefix_blocks(prompt)} & {*prefix_blocks(other)}


def test_requests_of_an_engine_that_is_lost_go_to_the_others_and_are_counted() -> None:
    lost, other = SmallEngine("a"), SmallEngine("b")
    lost.error = EngineLost("ended", engine="a")
    rollout = rollout_with(lost, other)
    made = [rollout.submit([3, 4], max_tokens=3).result(10) for _ in range(4)]
    assert all(trajectory.tokens.tolist() == [2, 2, EOS] for trajectory in made)
    assert rollout.router is not None and (rollout.router.lost, rollout.router.moved) == (["a"], 1)


def test_without_an_engine_left_a_request_raises_with_their_names() -> None:
    engines = [SmallEngine("a"), SmallEngine("b")]
    for engine in engines:
        engine.error = EngineLost("ended", engine=engine.name)
    with pytest.raises(NoEngineLeft) as caught:
        rollout_with(*engines).submit([3, 4]).result(10)
    assert (caught.value.engines, caught.value.cause) == (("a", "b"), "ended")


def test_a_rejected_request_disturbs_no_other() -> None:
    engine = SmallEngine()
    rollout = rollout_with(engine)
    engine.error = RequestFailed("too long", engine="engine", length=2)
    with pytest.raises(RequestFailed):
        rollout.submit([3, 4]).result(10)
    engine.error = None
    assert rollout.submit([3, 4], max_tokens=2).result(10).tokens.tolist() == [2, EOS]
    assert len(rollout) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_the_policy_does_not_have_end_their_request_alone(stream: bool) -> None:
    class Other(SmallEngine):
        async def generate(self, prompt: array[int], sampling: Mapping[str, Any], on_part: OnPart = None) -> Sampled:
            if len(prompt) == 2:
                return await super().generate(prompt, sampling)
            made = Sampled(array("q", [3, 1 << 20]), array("d", [-0.5] * 2), [(1, 2)])
            if on_part is not None:
                on_part(made)
            return made

    rollout = rollout_with(Other())
    failing, good = rollout.submit([3], stream=stream), rollout.submit([3, 4], max_tokens=2)
    assert good.result(10).tokens.tolist() == [2, EOS]
    error = failing.exception(10)
    assert isinstance(error, DataError) and (error.field, error.token) == ("tokens", 1 << 20)
    assert not failing.trajectory.tokens


@pytest.mark.parametrize("driven", [False, True])
def test_tokens_have_the_versions_of_the_engine_and_later_turns_go_on(driven: bool) -> None:
    engine = SmallEngine()
    rollout = rollout_with(engine, driven=driven)

    def result(submitted: Any) -> Trajectory:
        while driven and not submitted.done():
            assert rollout.start()
            rollout.take()
        trajectory: Trajectory = submitted.result(10)
        return trajectory

    first = result(rollout.submit([3, 4], max_tokens=3))
    assert (first.tokens.tolist(), first.versions.tolist(), first.ended) == ([2, 2, EOS], [1, 2, 2], "stop")
    first.replied([7, 7])
    second = result(rollout.submit(first, max_tokens=2))
    assert second is first and second.tokens.tolist() == [2, 2, EOS, 7, 7, 7, EOS]
    assert second.mask.tolist() == [1, 1, 1, 0, 0, 1, 1] and second.temperatures.tolist() == [1.0] * 7
    prompts = [prompt.tolist() for prompt, _ in engine.requests]
    assert prompts == [[3, 4], [3, 4, 2, 2, EOS, 7, 7]]
    seeds = [sampling["seed"] for _, sampling in engine.requests]
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize("after", [0, 2])
def test_the_rest_of_a_response_that_an_engine_stopped_is_submitted_again(after: int) -> None:
    engine = SmallEngine()
    engine.partial_after = after
    begun = Trajectory([3])
    begun.replied([EOS])  # of the environment: it ends nothing
    trajectory = rollout_with(engine).submit(begun, max_tokens=5).result(10)
    first, rest = [2] * after, [2 + after] * (4 - after)
    assert trajectory.tokens.tolist() == [EOS, *first, *rest, EOS]
    assert trajectory.versions.tolist() == [-1, *[1] * after, 1, *[2] * (4 - after)]
    assert engine.requests[1][1]["response_length"] == 5 - after


def test_an_engine_that_returns_nothing_ends_its_request_with_an_error() -> None:
    class Silent(SmallEngine):
        async def generate(self, prompt: array[int], sampling: Mapping[str, Any], on_part: OnPart = None) -> Sampled:
            return Sampled(array("q"), array("d"), [])

    error = rollout_with(Silent()).submit([3]).exception(10)
    assert isinstance(error, DataError) and error.field == "is_partial"


@pytest.mark.parametrize(
    ("tokens", "log_probs", "versions"),
    [(3, 3, 2), (3, 2, 3), (5, 5, 5)],
    ids=["versions", "log-probabilities", "limit"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_one_of_each_for_every_token_or_over_the_limit_is_an_error(
    tokens: int, log_probs: int, versions: int, stream: bool
) -> None:
    class Careless(SmallEngine):
        async def generate(self, prompt: array[int], sampling: Mapping[str, Any], on_part: OnPart = None) -> Sampled:
            made = Sampled(array("q", [3] * tokens), array("d", [-0.5] * log_probs), [(1, versions)])
            if on_part is None:
                return made
            on_part(made)
            return Sampled(array("q"), array("d"), [], is_partial=True)

    submitted = rollout_with(Careless()).submit([3], max_tokens=4, stream=stream)
    error = submitted.exception(10)
    assert isinstance(error, DataError) and (error.field, error.length) == ("tokens", tokens)
    assert not submitted.trajectory.tokens


def test_an_engine_that_cancels_a_request_by_itself_fails_it() -> None:
    class Cancels(SmallEngine):
        async def generate(self, prompt: array[int], sampling: Mapping[str, Any], on_part: OnPart = None) -> Sampled:
            raise asyncio.CancelledError

    rollout = rollout_with(Cancels())
    assert isinstance(rollout.submit([3]).exception(10), RequestFailed) and len(rollout) == 0


def test_a_trajectory_in_flight_is_not_submitted_again() -> None:
    rollout, trajectory = rollout_with(SmallEngine(), driven=True), Trajectory([3])
    first, other = rollout.submit(trajectory, max_tokens=2), rollout.submit(copy.deepcopy(trajectory), max_tokens=2)
    with pytest.raises(DataError) as caught:
        rollout.submit(trajectory)
    assert caught.value.field == "prompt"
    while not (first.done() and other.done()):
        rollout.advance()
    assert first.result(0).tokens.tolist() == other.result(0).tokens.tolist() == [1, EOS]
    assert rollout.submit(trajectory, max_tokens=2).cancel()


def test_a_request_that_is_cancelled_ends_in_the_engine() -> None:
    engine = SmallEngine()
    rollout = rollout_with(engine)
    engine.go_on = asyncio.Event()
    submitted = rollout.submit([3, 4])
    while not engine.in_flight:
        pass
    assert submitted.cancel()
    while not engine.cancelled:
        pass
    assert len(rollout) == 0


def test_tasks_that_are_left_on_a_loop_end_with_it() -> None:
    has_begun, has_ended = threading.Event(), threading.Event()

    async def receive() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    loop = RequestLoop()
    loop.start(receive())
    assert has_begun.wait(10)
    del loop
    gc.collect()
    assert has_ended.is_set()


def test_a_trajectory_is_awaited_on_any_event_loop() -> None:
    async def both() -> list[Trajectory]:
        rollout = rollout_with(SmallEngine())
        return list(await asyncio.gather(*(rollout.submit([3] * count, max_tokens=2) for count in (1, 2))))

    assert [trajectory.tokens.tolist() for trajectory in asyncio.run(both())] == [[1, EOS], [2, EOS]]


def test_a_driven_rollout_without_an_engine_left_ends_its_requests() -> None:
    engine = SmallEngine()
    engine.error = EngineLost("gone", engine="engine")
    rollout = rollout_with(engine, driven=True)
    submitted = rollout.submit([3, 4])
    assert rollout.start()
    for _ in range(20):
        rollout.take()
    assert isinstance(submitted.exception(0), NoEngineLeft) and len(engine.requests) == 1


def test_engines_of_a_group_that_cannot_be_reached_end_a_request_after_one_more_try() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    connections = []

    def engine_addresses() -> list[VllmAddress]:
        connections.append(port)
        return [VllmAddress("127.0.0.1", port, "token", RolloutConfig())]

    limits = Formula().generation_limits() | {"takes_requests": True}
    group = SimpleNamespace(generation_limits=lambda: [limits], engine_addresses=engine_addresses)
    rollout = TrajectoryRollout(group, driven=True, **SAMPLING)
    submitted = [rollout.submit([3, 4], seed=seed) for seed in range(2)]
    assert rollout.start()
    for _ in range(20):
        rollout.advance()
    assert len(rollout) == 0 and len(connections) <= 3
    for error in (one.exception(0) for one in submitted):
        assert isinstance(error, NoEngineLeft) and error.engines == (f"127.0.0.1:{port}",)


def test_a_request_that_could_not_be_sent_is_not_in_flight() -> None:
    class Failed:
        def __init__(self) -> None:
            self.calls = 0

        def generation_limits(self) -> list[dict[str, Any]]:
            return [Formula().generation_limits() | {"takes_requests": True}]

        def engine_addresses(self) -> list[VllmAddress]:
            self.calls += 1
            raise WorkerDied("it has ended")

    group = Failed()
    rollout = TrajectoryRollout(group, **SAMPLING)
    with pytest.raises(WorkerDied):
        rollout.submit([3, 4], seed=3)
    assert (len(rollout), group.calls) == (0, 1)


def test_responses_that_have_begun_end_before_those_that_wait() -> None:
    engine = ReferenceEngine(LocalWorkerGroup(ClassWithInitArgs(Formula)), step_tokens=3, max_rows=2)
    rollout = rollout_with(engine, driven=True)
    made = [rollout.submit([10 + number, 20], seed=number, max_tokens=7) for number in range(4)]
    ended: list[Any] = []
    for each in made:
        each.add_done_callback(ended.append)
    while rollout.start():
        rollout.take()
    assert [each in made[:2] for each in ended[:2]] == [True, True] and {*ended} == {*made}


def test_a_rollout_rejects_unknown_settings() -> None:
    with pytest.raises(ConfigError) as caught:
        rollout_with(SmallEngine(), temprature=8)
    assert (caught.value.key, caught.value.value) == ("temprature", 8)


def test_responses_of_a_rollout_have_at_most_its_response_length() -> None:
    engine = SmallEngine()
    rollout = rollout_with(engine, response_length=4)
    assert rollout.submit([3]).result(10).tokens.tolist() == [1, 1, 1, EOS] and rollout.limits["response_length"] == 4
    for length in (0, 25, "4"):
        with pytest.raises(ConfigError) as caught:
            rollout_with(engine, response_length=length)
        assert (caught.value.key, caught.value.value) == ("response_length", length)


def test_a_request_without_stop_tokens_is_rejected() -> None:
    rollout = TrajectoryRollout(LocalWorkerGroup(ClassWithInitArgs(Formula)), engines=[SmallEngine()])
    with pytest.raises(DataError) as caught:
        rollout.submit([5])
    assert caught.value.missing == ["eos_token_id", "pad_token_id"]


class StreamingEngine(SmallEngine):
    """Hands out ``parts`` of one token each, then waits for ``go_on``, and returns or raises."""

    parts = 3

    async def generate(self, prompt: array[int], sampling: Mapping[str, Any], on_part: OnPart = None) -> Sampled:
        self.requests.append((array("q", prompt), sampling))
        for number in range(self.parts if on_part else 0):
            assert on_part is not None
            on_part(Sampled(array("q", [10 + number]), array("d", [-0.1 * number]), [(number, 1)]))
        if self.go_on is not None:
            await self.go_on.wait()
        if self.error is not None:
            raise self.error
        rest = array("q", [20, EOS])
        return Sampled(rest, array("d", [-0.5, -0.6]), [(7, 2)])


@pytest.mark.parametrize("driven", [False, True])
def test_a_stream_grows_while_the_engine_goes_on_and_ends_as_the_same_record(driven: bool) -> None:
    engine = StreamingEngine()
    rollout = rollout_with(engine, driven=driven)
    engine.go_on = asyncio.Event()
    submitted = rollout.submit([5, 6], stream=True, seed=3)
    until = time.monotonic() + 30
    while len(submitted.trajectory.mask) < 3 and time.monotonic() < until:
        rollout.advance()
    assert submitted.trajectory.tokens.tolist() == [10, 11, 12] and not submitted.done()
    rollout.engine._loop._loop.call_soon_threadsafe(engine.go_on.set)
    while driven and not submitted.done():
        rollout.advance()
    made = submitted.result(30)
    assert (made.tokens.tolist(), made.ended) == ([10, 11, 12, 20, EOS], "stop")
    assert made.log_probs.tolist() == pytest.approx([0, -0.1, -0.2, -0.5, -0.6])
    assert made.versions.tolist() == [0, 1, 2, 7, 7] and made.mask.tolist() == [1] * 5 and len(engine.requests) == 1


def test_a_stream_of_an_engine_that_is_lost_goes_on_at_another_one_after_its_tokens() -> None:
    first, second = StreamingEngine("first"), StreamingEngine("second")
    first.error = EngineLost("gone", engine="first")
    second.parts = 1
    rollout = rollout_with(first, second)
    made = rollout.submit([5, 6], stream=True, seed=3, max_tokens=9).result(30)
    assert made.tokens.tolist() == [10, 11, 12, 10, 20, EOS]
    ((prompt, sampling),) = second.requests
    assert prompt.tolist() == [5, 6, 10, 11, 12] and sampling["response_length"] == 6
    assert rollout.router is not None and (rollout.router.lost, rollout.router.moved) == (["first"], 1)


def test_an_episode_gets_the_tokens_of_a_stream_before_they_end_and_may_keep_some() -> None:
    engine = StreamingEngine()
    engine.go_on = asyncio.Event()

    async def stops_early(rollout: Any, problem: Mapping[str, Any]) -> Trajectory:
        trajectory = Trajectory(problem["prompt_ids"])
        waiting = rollout.submit(trajectory, stream=True)
        while len(trajectory.tokens) < 3:
            await asyncio.sleep(0.01)
        waiting.cancel()
        del trajectory.tokens[2:], trajectory.mask[2:]
        return trajectory

    episodes = Episodes(stops_early, processes=0)
    episodes.connect(rollout_with(engine, driven=True))
    future = episodes.start({"prompt_ids": [5, 6]}, seed=3)
    episodes.run()
    made = future.result()
    assert made.tokens.tolist() == [10, 11] and made.versions.tolist() == [0, 1]
    assert made.log_probs.tolist() == pytest.approx([0, -0.1])
