"""The process that calls reward functions: it receives samples and returns a value or an error for each."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mcontroller.config.imports import import_object
from mcontroller.errors import ConfigError
from mcontroller.ppo.scoring.config import RewardFunctionConfig

__all__ = ["LoadedFunction", "Sample", "ScoreOutcome", "serve", "serve_descriptor"]

MOMENT_S = 0.02
"""[s] Time for which the outcomes of fast samples are kept, to be returned together."""

Sample = Mapping[str, Any]
"""The arguments of a reward function for one response, by name."""


@dataclass(frozen=True)
class ScoreOutcome:
    """The result of a reward function for one sample.

    Attributes:
        score: the score; None if the function does not apply.
        values: further values that the function returned, by name.
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
        self.takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self.names = {each.name for each in parameters}
        named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        self.required = tuple(each.name for each in named if each.default is each.empty)
        called = self.function if inspect.isroutine(self.function) else type(self.function).__call__
        self.is_async = inspect.iscoroutinefunction(called)

    def outcomes(self, samples: Sequence[Sample], timeout_s: float) -> Iterator[list[ScoreOutcome]]:
        """Yield the outcomes of all samples, in order. The samples of an async function are scored at the same time.

        Those of an ordinary function are scored one after the other, and yielded when they have taken a moment.
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
        except (Exception, SystemExit) as error:  # a user's function can raise anything; it is reported with its sample
            return _failed(error)

    async def _concurrent(self, samples: Sequence[Sample], timeout_s: float) -> list[ScoreOutcome]:
        return list(await asyncio.gather(*(self._awaited(sample, timeout_s) for sample in samples)))

    async def _awaited(self, sample: Sample, timeout_s: float) -> ScoreOutcome:
        try:
            return _checked(await asyncio.wait_for(self.function(**self.arguments(sample)), timeout_s))
        except TimeoutError:
            return ScoreOutcome(error=f"it did not return within {timeout_s:g} s")
        except Exception as error:  # as in _of_sample
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
        except (Exception, SystemExit) as error:  # as in _of_sample
            return [_failed(error)] * len(samples)
        return [_outcome_or_error(value) for value in values]


def serve_descriptor(descriptor: int) -> None:
    """Serve on the connection with this file descriptor: the body of a process."""
    serve(Connection(descriptor))


def serve(connection: Connection) -> None:
    """Import the functions, then answer ``(name, samples)`` with lists of outcomes until the connection closes.

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
        try:
            name, samples = connection.recv()
        except EOFError:
            return
        for outcomes in loaded[name].outcomes(samples, timeout_s):
            connection.send(outcomes)


def _outcome_or_error(value: Any) -> ScoreOutcome:
    try:
        return _checked(value)
    except (TypeError, ValueError) as error:
        return _failed(error)


def _checked(value: Any) -> ScoreOutcome:
    """Return the outcome for what a function returned: a number, None, or a mapping with a ``score``."""
    if isinstance(value, Mapping):
        if "score" not in value:
            raise TypeError(f"it returned a mapping with {', '.join(map(str, value))}; expected a key 'score'")
        others = {str(name): _number(each) for name, each in value.items() if name != "score"}
        score = value["score"]
        return ScoreOutcome(None if score is None else _number(score), others)
    return ScoreOutcome(None if value is None else _number(value))


def _number(value: Any) -> float:
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"it returned {repr(value)[:60]} of type {type(value).__name__}; expected a number or None")
    if not math.isfinite(value):
        raise ValueError(f"it returned {value}; expected a finite number or None")
    return float(value)


def _failed(error: BaseException) -> ScoreOutcome:
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""
    return ScoreOutcome(error=f"{type(error).__name__}: {error}{line}")
