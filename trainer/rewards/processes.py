"""Processes that call reward functions, with a deadline for every sample: a process that hangs or dies is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import numbers
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

from mcontroller.config.imports import import_object
from mcontroller.errors import ConfigError
from trainer.rewards.config import RewardFunctionConfig
from trainer.rewards.helper_process import HelperProcess, served

MOMENT_S = 0.02
"""[s] Time for which the outcomes of fast samples are kept, to be returned together."""

FAILURES = (Exception, SystemExit, asyncio.CancelledError)
"""What a reward function may raise without ending its process: it is reported with its sample."""

Sample = Mapping[str, Any]
"""The arguments of a reward function for one response, by name."""
SERVER = "import sys; from trainer.rewards.processes import serve_descriptor; serve_descriptor(int(sys.argv[1]))"


@dataclass(frozen=True)
class ScoreOutcome:
    """The result of a reward function for one sample.

    Attributes:
        score: the score; None if the function does not apply.
        values: other values that the function returned, by name.
        error: the reason if there is no result.
    """

    score: float | None = None
    values: Mapping[str, float] | None = None
    error: str | None = None


class LoadedFunction:
    """A reward function with the arguments that it takes.

    Args:
        config: its import path and options.
        key: its key in the configuration, for error messages.

    Raises:
        ConfigError: it cannot be imported, or is not callable.
    """

    def __init__(self, config: RewardFunctionConfig, key: str) -> None:
        self.config = config
        self.function = import_object(config.function, f"{key}.function")
        if not callable(self.function):
            raise ConfigError(
                f"{key}.function is {config.function!r}, which is of type {type(self.function).__name__}; expected a "
                "function",
                key=f"{key}.function",
            )
        parameters = inspect.signature(self.function).parameters.values()
        self.takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.names = {parameter.name for parameter in parameters}
        named = [
            parameter
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        self.required = tuple(parameter.name for parameter in named if parameter.default is parameter.empty)
        called = self.function if inspect.isroutine(self.function) else type(self.function).__call__
        self.is_async = inspect.iscoroutinefunction(called)

    def outcomes(self, samples: Sequence[Sample], timeout_s: float) -> Iterator[list[ScoreOutcome]]:
        """Yield the outcomes of all samples, in order. The samples of an async function are scored at the same time.

        The samples of an ordinary function are scored one after the other, and yielded when they have taken a moment.
        """
        if self.config.batch:
            yield self._of_batch(samples)
        elif self.is_async:
            yield asyncio.run(self._concurrent(samples, timeout_s))
        else:
            yield from self._of_each(samples)

    def _of_each(self, samples: Sequence[Sample]) -> Iterator[list[ScoreOutcome]]:
        ready: list[ScoreOutcome] = []
        began = time.monotonic()
        for sample in samples:
            ready.append(self._of_sample(sample))
            if time.monotonic() - began > MOMENT_S:
                yield ready
                ready, began = [], time.monotonic()
        if ready:
            yield ready

    def arguments(self, sample: Sample) -> dict[str, Any]:
        """Return the keyword arguments of a call: the values that the function's signature names, and the options."""
        chosen = {name: value for name, value in sample.items() if self.takes_all or name in self.names}
        return chosen | self.config.options

    def _of_sample(self, sample: Sample) -> ScoreOutcome:
        try:
            return _checked(self.function(**self.arguments(sample)))
        except FAILURES as error:
            return _failed(error)

    async def _concurrent(self, samples: Sequence[Sample], timeout_s: float) -> list[ScoreOutcome]:
        return list(await asyncio.gather(*(self._awaited(sample, timeout_s) for sample in samples)))

    async def _awaited(self, sample: Sample, timeout_s: float) -> ScoreOutcome:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return _checked(await self.function(**self.arguments(sample)))
        except FAILURES as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                return ScoreOutcome(error=f"it did not return within {timeout_s:g} s")
            return _failed(error)

    def _of_batch(self, samples: Sequence[Sample]) -> list[ScoreOutcome]:
        names = {name for sample in samples for name in sample}
        columns = self.arguments({name: [sample.get(name) for sample in samples] for name in sorted(names)})
        try:
            result = asyncio.run(self.function(**columns)) if self.is_async else self.function(**columns)
            if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__"):
                raise TypeError(
                    f"it returned {repr(result)[:60]}; expected one score for each of {len(samples)} samples"
                )
            values = result.tolist() if hasattr(result, "tolist") else list(result)
            if len(values) != len(samples):
                raise ValueError(f"it returned {len(values)} scores for {len(samples)} samples")
        except FAILURES as error:
            return [_failed(error)] * len(samples)
        return [_outcome_or_error(value) for value in values]


def serve_descriptor(descriptor: int) -> None:
    """Serve on the connection with this file descriptor: the body of a process."""
    with served(descriptor) as connection:
        serve(connection)


def serve(connection: Connection) -> None:
    """Import the functions, then answer ``(name, samples)`` with lists of outcomes; EOFError at the end of the program.

    The first message that arrives has the functions by name and the deadline in seconds. The answer is None, or the
    text of the error if a function cannot be loaded.
    """
    functions, timeout_s = connection.recv()
    try:
        loaded = {name: LoadedFunction(config, f"rewards.functions.{name}") for name, config in functions.items()}
    except ConfigError as error:
        connection.send(str(error))
        return
    connection.send(None)
    while True:
        name, samples = connection.recv()
        for outcomes in loaded[name].outcomes(samples, timeout_s):
            connection.send(outcomes)


def _outcome_or_error(value: Any) -> ScoreOutcome:
    try:
        return _checked(value)
    except FAILURES as error:
        return _failed(error)


def _checked(value: Any) -> ScoreOutcome:
    """Return the outcome for what a function returned: a number, None, or a mapping with a ``score``."""
    if isinstance(value, Mapping):
        if "score" not in value:
            raise TypeError(f"it returned a mapping with {', '.join(map(str, value))}; expected a key 'score'")
        values = {str(name): _number(number, f"{name!r}: ") for name, number in value.items()}
        score = values.pop("score")
        return ScoreOutcome(score, {name: number for name, number in values.items() if number is not None})
    return ScoreOutcome(_number(value))


def _number(value: Any, key: str = "") -> float | None:
    """Return a number that a function returned, under ``key`` of a mapping; None for None."""
    if hasattr(value, "item"):
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        shown = f"{key}{repr(value)[:60]} of type {type(value).__name__}"
        raise TypeError(f"it returned {shown}; expected a number or None")
    if not math.isfinite(value):
        raise ValueError(f"it returned {key}{value}; expected a finite number or None")
    return float(value)


def _failed(error: BaseException) -> ScoreOutcome:
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""
    return ScoreOutcome(error=f"{type(error).__name__}: {error}{line}")


@dataclass(frozen=True)
class Task:
    """Samples that are sent to one process in one message.

    Attributes:
        name: the name of the function.
        samples: the arguments of each sample.
        indices: the positions of the samples in the batch.
        margin_s: [s] time after the deadline before the process is killed.
        divisible: whether the samples are scored one after the other: the deadline is that of one sample, and if the
            process is lost, those that it has not returned are sent again, each by itself.
    """

    name: str
    samples: Sequence[Sample]
    indices: Sequence[int]
    margin_s: float = 0.0
    divisible: bool = False


class ScoringProcesses:
    """Processes on this machine, which start when they are needed. A thread for each waits for its answers.

    Args:
        functions: the reward functions, by name.
        processes: the number of processes.
        timeout_s: [s] deadline of a task.
    """

    def __init__(self, functions: Mapping[str, RewardFunctionConfig], processes: int, timeout_s: float) -> None:
        self.functions = dict(functions)
        self.timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(processes, "scoring")
        self._idle: SimpleQueue[HelperProcess] = SimpleQueue()
        self._servers: list[HelperProcess] = []
        self._closed = False

    def run(self, tasks: Sequence[Task]) -> dict[str, dict[int, ScoreOutcome]]:
        """Return the outcomes of the samples of every task, by the name of the function and the index of the sample.

        A process that does not return in time is killed, and the next task starts another one.

        Raises:
            ConfigError: a process cannot import a function, or ``close`` was called.
        """
        results: dict[str, dict[int, ScoreOutcome]] = {task.name: {} for task in tasks}
        for task, outcomes in zip(tasks, self._threads.map(self._outcomes, tasks), strict=True):
            results[task.name].update(zip(task.indices, outcomes, strict=True))
        return results

    def close(self) -> None:
        """End every process. A call of ``run`` in another thread ends."""
        self._closed = True
        for server in list(self._servers):
            server.kill()
        self._threads.shutdown(cancel_futures=True)

    def _outcomes(self, task: Task) -> list[ScoreOutcome]:
        """Return the outcomes of a task, in the order of its samples."""
        server, lost = self._living(), ""
        outcomes: list[ScoreOutcome] = []
        with contextlib.suppress(OSError):  # it has ended, or does not read: the answer says so
            server.connection.send((task.name, task.samples))
        while len(outcomes) < len(task.samples) and not lost:
            try:
                if server.connection.poll(self.timeout_s + task.margin_s):
                    outcomes += server.connection.recv()
                else:
                    lost = f"it did not return within {self.timeout_s:g} s"
            except (EOFError, OSError):
                server.wait()
                lost = f"its process ended with exit code {server.process.returncode}"
        if not lost:
            self._idle.put(server)
            return outcomes
        self._end(server)
        left = task.samples[len(outcomes) :]
        if task.divisible and len(task.samples) > 1:
            return outcomes + [self._outcomes(replace(task, samples=[sample]))[0] for sample in left]
        return outcomes + [ScoreOutcome(error=lost)] * len(left)

    def _living(self) -> HelperProcess:
        """Return an idle process that lives, or a new one."""
        with contextlib.suppress(Empty):
            while True:
                server = self._idle.get_nowait()
                if server.process.poll() is None:
                    return server
                self._end(server)
        return self._start()

    def _start(self) -> HelperProcess:
        """Start a process that imports the functions. A message to it, or from it, does not take longer than a task."""
        if self._closed:
            raise ConfigError("the processes of the reward functions were closed", key="rewards.functions")
        first = self.functions, self.timeout_s
        server = HelperProcess.start(SERVER, first, "the reward functions", "rewards.functions", self.timeout_s)
        self._servers.append(server)
        if self._closed:  # meanwhile, by another thread
            server.kill()
        return server

    def _end(self, server: HelperProcess) -> None:
        """End a process and its children."""
        self._servers.remove(server)
        server.close()
