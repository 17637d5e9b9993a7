"""The side of an episode: its rollout, and the event loop on which it runs, in this process or another."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from mcontroller.config.imports import import_object
from mcontroller.errors import ConfigError
from mcontroller.ppo.agents.trajectories import Trajectory

SERVER = "import sys; from mcontroller.ppo.agents.episode_loop import serve_episodes; serve_episodes(int(sys.argv[1]))"


class EpisodeRollout:
    """The rollout as an episode sees it.

    Attributes:
        tokenizer: of the policy, for what an environment replies.
        seed: of this episode, for random numbers of its own.
        response_length: [tokens] the most of a whole response.
    """

    def __init__(self, loop: EpisodeLoop, number: int, seed: int, response_length: int) -> None:
        self._loop, self._number = loop, number
        self.tokenizer, self.seed, self.response_length = loop.tokenizer, seed, response_length

    def submit(
        self, prompt: Sequence[int] | Trajectory, *, stop_token_ids: Collection[int] = (), **options: Any
    ) -> asyncio.Future[Trajectory]:
        """Ask the policy for a response, or the next turn of one: ``await`` it; see ``TrajectoryRollout.submit``."""
        trajectory = prompt if isinstance(prompt, Trajectory) else Trajectory([int(token) for token in prompt])
        return self._loop.submit(self._number, trajectory, {"stop_token_ids": [*stop_token_ids], **options})


class EpisodeLoop:
    """Runs episodes on an event loop, and exchanges messages with the controller, in whose process or another.

    Args:
        episode: the function, or an object with ``__call__``.
        tokenizer: of the policy.
        send: sends a message to the controller.

    Attributes:
        tokenizer: as passed.
        loop: the event loop.
    """

    def __init__(self, episode: Callable[..., Any], tokenizer: Any, send: Callable[[Any], None]) -> None:
        self.episode, self.tokenizer, self._send = episode, tokenizer, send
        self.loop = asyncio.new_event_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, tuple[int, Trajectory, asyncio.Future[Trajectory]]] = {}
        self._requests = 0

    def handle(self, message: tuple[Any, ...]) -> None:
        """Act on a message of the controller: ``start``, ``made``, ``failed`` or ``stop``."""
        kind, number, *values = message
        if kind == "start":
            self._tasks[number] = self.loop.create_task(self._run(number, *values))
        elif kind == "stop":
            if number in self._tasks:
                self._tasks[number].cancel()
            self._send(("stopped", number))
        elif number in self._asked:
            _, trajectory, future = self._asked.pop(number)
            if kind == "failed":
                future.set_exception(values[0])
            else:
                added, trajectory.ended = values[0]
                for name, part in added.items():
                    getattr(trajectory, name).extend(part)
                trajectory.own += [1] * len(added["tokens"])
                future.set_result(trajectory)

    def submit(self, number: int, trajectory: Trajectory, options: Mapping[str, Any]) -> asyncio.Future[Trajectory]:
        """Send a trajectory to the rollout, and return the future of its next turn."""
        self._requests += 1
        request, future = self._requests, self.loop.create_future()
        self._asked[request] = number, trajectory, future
        future.add_done_callback(
            lambda done: self._asked.pop(request, None) and self._send(("cancel", number, request))
        )
        self._send(("submit", number, request, replace(trajectory, experts=[]), options))
        return future

    def all_wait(self) -> bool:
        """Whether every episode waits for the rollout."""
        return self._tasks.keys() <= {number for number, _, future in self._asked.values() if not future.done()}

    async def _run(self, number: int, problem: Mapping[str, Any], seed: int, response_length: int) -> None:
        try:
            made = await self.episode(EpisodeRollout(self, number, seed, response_length), problem)
            self._send(("end", number, replace(made, experts=[]) if isinstance(made, Trajectory) else repr(made)[:60]))
        except asyncio.CancelledError:
            pass  # the controller has stopped it
        except (Exception, SystemExit) as error:  # the function of a program can raise anything
            self._send(("raised", number, f"{type(error).__name__}: {error}"))
        finally:
            del self._tasks[number]


def load_episode(function: str | Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function of an import path, or the object of a class, with its options.

    Raises:
        ConfigError: it cannot be imported, does not take the options, or is not async.
    """
    found: Any = import_object(function, "multi_turn.episode") if isinstance(function, str) else function
    try:
        episode: Any = found(**options) if inspect.isclass(found) else partial(found, **options)
        inspect.signature(episode).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"multi_turn.options do not fit {function!r}: {error}", key="multi_turn.options") from error
    called = found.__call__ if inspect.isclass(found) or not inspect.isroutine(found) else found
    if not inspect.iscoroutinefunction(called):
        raise ConfigError(
            f"multi_turn.episode is {function!r}, which is not async; expected async def episode(rollout, problem), or "
            "a class with async def __call__(self, rollout, problem)",
            key="multi_turn.episode",
        )
    return episode  # type: ignore[no-any-return]


def serve_episodes(descriptor: int) -> None:
    """Run episodes for the controller on the connection with this file descriptor: the body of a process."""
    connection = Connection(descriptor)
    function, options, tokenizer = connection.recv()
    try:
        episodes = EpisodeLoop(load_episode(function, options), tokenizer, connection.send)
    except ConfigError as error:
        connection.send(str(error))
        return
    connection.send(None)

    def receive() -> None:
        try:
            episodes.handle(connection.recv())
        except (EOFError, ConnectionResetError):
            episodes.loop.stop()

    episodes.loop.add_reader(connection.fileno(), receive)
    episodes.loop.run_forever()
