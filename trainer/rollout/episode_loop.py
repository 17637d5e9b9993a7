"""The side of an episode: its rollout, and the event loop on which it runs, in this process or another."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import pickle
import selectors
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from mcontroller.config.imports import import_object
from mcontroller.errors import ConfigError, DataError
from trainer.rewards.helper_process import served
from trainer.rollout.trajectory import IN_FLIGHT, Trajectory

SERVER = "import sys; from trainer.rollout.episode_loop import serve_episodes; serve_episodes(int(sys.argv[1]))"


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
        trajectory = prompt if isinstance(prompt, Trajectory) else Trajectory(array("q", prompt))
        return self._loop.submit(self._number, trajectory, {"stop_token_ids": [*stop_token_ids], **options})


class EpisodeSelector(selectors.DefaultSelector):
    """Ends a run of the event loop at a time, or before if all episodes wait for the rollout."""

    def __init__(self, episodes: EpisodeLoop) -> None:
        super().__init__()
        self._episodes, self.until = episodes, math.inf

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events; the event loop passes None if it has neither callbacks nor timers."""
        if self.until == math.inf:
            return super().select(timeout)
        left = max(self.until - time.monotonic(), 0.0)
        if left == 0.0 or (timeout is None and self._episodes.all_wait()):
            self._episodes.loop.stop()
            left = 0.0
        return super().select(left if timeout is None else min(timeout, left))


class EpisodeLoop:
    """Runs episodes on an event loop, and exchanges messages with the controller, in whose process or another.

    Args:
        episode: the function, or an object with ``__call__``.
        tokenizer: of the policy.
        send: sends a message to the controller: its kind, the number of the episode, and a pickle of what follows.

    Attributes:
        tokenizer: as passed.
        loop: the event loop.
    """

    def __init__(self, episode: Callable[..., Any], tokenizer: Any, send: Callable[[Any], None]) -> None:
        self.episode, self.tokenizer, self._transport = episode, tokenizer, send
        self._selector = EpisodeSelector(self)
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._pending: dict[int, dict[int, tuple[Trajectory, asyncio.Future[Trajectory]]]] = {}
        self._requests: dict[int, int] = {}

    def _send(self, kind: str, number: int, *values: Any) -> None:
        """Send a message; if it cannot be written, the error is that of the episode that sends it."""
        self._transport((kind, number, pickle.dumps(values)))

    def handle(self, message: tuple[Any, ...]) -> None:
        """Act on a message of the controller: ``start``, ``part``, ``made``, ``failed`` or ``stop``."""
        kind, number, *values = message
        if kind == "start":
            self._requests[number], self._pending[number] = 0, {}
            self._tasks[number] = self.loop.create_task(self._run(number, *values))
        elif kind == "stop":
            if number in self._tasks:
                self._tasks[number].cancel()
            self._send("stopped", number)
        elif values[0] in (pending := self._pending.get(number, {})):
            trajectory, future = pending[values[0]]
            if future.done():  # cancelled: it says so to the controller next
                return
            if kind != "part":
                del pending[values[0]]
            if kind == "failed":
                future.set_exception(values[1])
            else:
                added, trajectory.ended = values[1]
                try:
                    for name, part in added.items():
                        getattr(trajectory, name).extend(part)
                    trajectory.mask.extend([1] * len(added["tokens"]))
                except Exception as error:  # the episode has changed the trajectory meanwhile
                    future.set_exception(error)
                else:
                    if kind == "made":
                        future.set_result(trajectory)

    def submit(self, number: int, trajectory: Trajectory, options: Mapping[str, Any]) -> asyncio.Future[Trajectory]:
        """Send a trajectory to the rollout, and return the future of its next turn."""
        request, future = self._requests[number], self.loop.create_future()
        pending = self._pending[number]
        if any(trajectory is other and not waiting.done() for other, waiting in pending.values()):
            raise DataError(IN_FLIGHT, field="prompt")
        self._requests[number] = request + 1
        pending[request] = trajectory, future

        def left(done: object) -> None:
            if pending.pop(request, None) is not None:
                self._send("cancel", number, request)

        future.add_done_callback(left)
        self._send("submit", number, request, replace(trajectory, experts=[]), options)
        return future

    def all_wait(self) -> bool:
        """Whether every episode waits for the rollout."""
        return all(any(not future.done() for _, future in pending.values()) for pending in self._pending.values())

    def run(self, seconds: float) -> None:
        """Let the episodes go on until all of them wait for the rollout with nothing else to do, or for a time."""
        self._selector.until = time.monotonic() + seconds
        with contextlib.suppress(SystemExit):  # of a task that an episode has created
            self.loop.run_forever()
        self._selector.until = math.inf

    def close(self) -> None:
        """Cancel the episodes."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        self._tasks.clear()
        self.loop.close()

    async def _run(self, number: int, problem: Mapping[str, Any], seed: int, response_length: int) -> None:
        try:
            made = await self.episode(EpisodeRollout(self, number, seed, response_length), problem)
            self._send("end", number, replace(made, experts=[]) if isinstance(made, Trajectory) else repr(made)[:60])
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the function of a program can raise anything
            self._send("raised", number, text_of(error))
        finally:
            del self._tasks[number], self._requests[number], self._pending[number]


def text_of(error: BaseException) -> str:
    """Return type and text of an exception, whose text may raise one itself, in at most 1000 characters."""
    return "".join(traceback.format_exception_only(error)).strip()[:1000]


def load_episode(function: str | Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function of an import path, or the object of a class, with its options.

    Raises:
        ConfigError: it cannot be imported, does not take the options, or is not async.
    """
    given: Any = import_object(function, "multi_turn.episode") if isinstance(function, str) else function
    try:
        episode: Any = given(**options) if inspect.isclass(given) else partial(given, **options)
        inspect.signature(episode).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"multi_turn.options do not fit {function!r}: {error}", key="multi_turn.options") from error
    called = given.__call__ if inspect.isclass(given) or not inspect.isroutine(given) else given
    if not inspect.iscoroutinefunction(called):
        raise ConfigError(
            f"multi_turn.episode is {function!r}, which is not async; expected async def episode(rollout, problem), or "
            "a class with async def __call__(self, rollout, problem)",
            key="multi_turn.episode",
        )
    return episode  # type: ignore[no-any-return]


def serve_episodes(descriptor: int) -> None:
    """Run episodes for the controller on the connection with this file descriptor: the body of a process.

    Threads read and write the messages. If the event loop did, it could wait to write one to a controller that waits to
    write one to it; and the controller would wait for every episode that blocks.
    """
    with served(descriptor) as connection:
        function, options, tokenizer = connection.recv()
        unsent = SimpleQueue[Any]()
        try:
            episodes = EpisodeLoop(load_episode(function, options), tokenizer, unsent.put)
        except ConfigError as error:
            connection.send(str(error))
            return
        connection.send(None)
        for exchange in (partial(_write, connection, unsent), partial(_read, connection, episodes)):
            threading.Thread(target=exchange, daemon=True).start()
        episodes.loop.run_forever()


def _write(connection: Connection, unsent: SimpleQueue[Any]) -> None:
    with contextlib.suppress(OSError):  # the controller has ended, which the other thread notices
        while True:
            connection.send(unsent.get())


def _read(connection: Connection, episodes: EpisodeLoop) -> None:
    try:
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                episodes.loop.call_soon_threadsafe(episodes.handle, connection.recv())
    finally:
        episodes.loop.call_soon_threadsafe(episodes.loop.stop)
