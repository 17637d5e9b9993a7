"""The reward of a run: configured functions on decoded texts, in processes, with weights, failures and samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError
from trainer.columns import columns, response_lengths
from trainer.metrics import name_conflict
from trainer.rewards.config import RESERVED_COLUMNS, RewardsConfig
from trainer.rewards.processes import LoadedFunction, Sample, ScoreOutcome, ScoringProcesses, Task
from trainer.rewards.reward import Reward, outcome_scores
from trainer.rewards.trial import SHOWN, description_of, try_functions

logger = logging.getLogger(__name__)

SHOWN_FAILURES = 3
"""Failures of a function that are reported with their sample, for each batch."""
MOST_SAMPLES = 32
"""Samples of a message: each message costs more than a fast function."""
ASYNC_MARGIN_S = 5.0
"""Time after the deadline in which a process returns the outcomes of async functions that it cancelled."""


class Decoder(Protocol):
    """The method of a tokenizer that rewards use."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""


class FunctionRewards:
    """A reward function that calls the functions of a configuration for every response.

    A function is called with the arguments that its signature names, of: ``prompt`` and ``response``, the texts;
    ``answer``; and the columns of the data set. It returns a number, None if it does not apply, or a mapping with a
    ``score`` and other numbers, which are reported. A response to which no function applies has no score, nor has one
    for which a function failed, unless there is a ``failed_score``.

    Reads ``responses`` and ``response_mask`` ``[rows, response]``, and the columns ``prompt``, ``answer`` and
    ``record``.

    Args:
        config: the functions.
        tokenizer: decodes the responses.

    Raises:
        ConfigError: there is no function, or one cannot be imported.
    """

    reads = ("responses", "response_mask")

    def __init__(self, config: RewardsConfig, tokenizer: Decoder) -> None:
        check_functions(config)
        self.config = config
        self.tokenizer = tokenizer
        self.functions = {
            name: LoadedFunction(function, f"rewards.functions.{name}") for name, function in config.functions.items()
        }
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rewards")
        self.pool = ScoringProcesses(config.functions, config.processes, config.timeout_s)

    def start(self, batch: DataProto) -> Callable[[], Reward]:
        """Start to score a batch, while the caller does other work; return a function that waits for its scores."""
        (mask,) = columns(batch, "response_mask")
        return self._thread.submit(self._reward, self.samples(batch), mask).result

    def __call__(self, batch: DataProto) -> Reward:
        """Return the scores of a batch.

        Raises:
            DataError: a function failed for all samples.
        """
        return self.start(batch)()

    def samples(self, batch: DataProto) -> list[Sample]:
        """Return the arguments of the functions for every response of a batch."""
        responses, mask = columns(batch, "responses", "response_mask")
        lengths = response_lengths(mask)
        others = batch.non_tensor_batch
        samples: list[Sample] = []
        for row, (ids, length) in enumerate(zip(responses.tolist(), lengths.tolist(), strict=True)):
            text = self.tokenizer.decode(ids[:length])
            known = {"prompt": others["prompt"][row], "response": text, "answer": others["answer"][row]}
            samples.append({**others["record"][row], **known})
        return samples

    def check(
        self,
        training: Mapping[str, Sequence[Sample]],
        *,
        held_out: Mapping[str, Sequence[Sample]] = MappingProxyType({}),
        must_apply: bool = True,
    ) -> tuple[list[str], set[str]]:
        """Call every function with problems of each kind and their right answers as responses; see ``try_functions``.

        Args:
            training: by the key of a data set, its problems, the right answer of each as its response.
            held_out: held-out problems, likewise.
            must_apply: reject functions that apply to none of them.

        Returns:
            A line for each training set whose right answers do not get the best score, and the names of the columns
            that the functions returned.

        Raises:
            ConfigError: a function cannot be imported.
            DataError: see ``try_functions``.
        """
        returned = {*self.functions, "reward_failed"}

        def call(name: str, tried: Sequence[Sample]) -> Sequence[ScoreOutcome]:
            by_row = self.pool.run(self._tasks(name, self.functions[name], tried))[name]
            outcomes = [by_row[row] for row in range(len(tried))]
            returned.update(self._other_values(name, outcomes))  # raises an error for the names of its values
            return outcomes

        return try_functions(self.functions, training, call, held_out=held_out, must_apply=must_apply), returned

    def close(self) -> None:
        """End the processes."""
        self.pool.close()
        self._thread.shutdown(cancel_futures=True)

    def _reward(self, samples: Sequence[Sample], mask: Any) -> Reward:
        tasks = [task for name, function in self.functions.items() for task in self._tasks(name, function, samples)]
        count = len(samples)
        total, applies, failed = np.zeros(count), np.zeros(count, bool), np.zeros(count, bool)
        reported: dict[str, Sequence[float]] = {}
        for name, of_function in self.pool.run(tasks).items():
            outcomes = [of_function[row] for row in range(count)]
            self._report(name, outcomes, samples)
            given = [one.score if one.error is None else self.config.failed_score for one in outcomes]
            scores = np.array([math.nan if score is None else score for score in given])
            total += self.config.functions[name].weight * np.nan_to_num(scores)
            applies |= ~np.isnan(scores)
            failed |= [one.error is not None for one in outcomes]
            reported |= {name: scores.tolist(), **self._other_values(name, outcomes)}
        reported["reward_failed"] = failed.astype(float).tolist()
        scored = applies if self.config.failed_score is not None else applies & ~failed
        shown = [
            {name: sample[name] for name in SHOWN}
            | {"score": float(total[row]) if scored[row] else None}
            | {column: None if math.isnan(values[row]) else values[row] for column, values in reported.items()}
            for row, sample in enumerate(samples)
        ]
        return Reward(
            outcome_scores(np.where(scored, total, 0.0).tolist(), mask), reported, shown, scored=scored.tolist()
        )

    def _tasks(self, name: str, function: LoadedFunction, samples: Sequence[Sample]) -> list[Task]:
        """Return a function's tasks: one for a batch, one per process for async functions, else of a few samples."""
        whole, together = function.config.batch, function.is_async
        few = max(1, min(MOST_SAMPLES, len(samples) // self.config.processes))
        parts = 1 if whole else self.config.processes if together else -(-len(samples) // few)
        rows = [range(part, len(samples), parts) for part in range(min(parts, len(samples)))]
        margin = ASYNC_MARGIN_S if together and not whole else 0.0
        divisible = not (whole or together)
        return [
            Task(name, [self._sent(function, samples[row]) for row in part], list(part), margin, divisible)
            for part in rows
        ]

    def _sent(self, function: LoadedFunction, sample: Sample) -> Sample:
        return sample if function.takes_all else {key: value for key, value in sample.items() if key in function.names}

    def _other_values(self, name: str, outcomes: Sequence[ScoreOutcome]) -> dict[str, Sequence[float]]:
        """Return the columns of the numbers that a function returns beside its scores.

        Raises:
            DataError: one has a name that samples or metrics have already.
        """
        prefix = "" if len(self.functions) == 1 else f"{name}/"
        keys = dict.fromkeys(key for outcome in outcomes for key in outcome.values or {})
        if conflict := name_conflict([f"{prefix}{key}" for key in keys], (*RESERVED_COLUMNS, *self.functions)):
            text = f"the reward function {name!r} returned a value with the name {conflict[0]!r}, which metrics or "
            raise DataError(f"{text}samples have already: give it another name", function=name, column=conflict[0])
        return {f"{prefix}{key}": [(outcome.values or {}).get(key, math.nan) for outcome in outcomes] for key in keys}

    def _report(self, name: str, outcomes: Sequence[ScoreOutcome], samples: Sequence[Sample]) -> None:
        """Log the failures of a function with their samples.

        Raises:
            DataError: it failed for all samples.
        """
        rows = [row for row, outcome in enumerate(outcomes) if outcome.error is not None]
        if rows and len(rows) == len(samples):
            raise DataError(
                f"the reward function {name!r} failed for all {len(rows)} samples of a batch: "
                f"{outcomes[0].error}. {description_of(samples[0])}",
                function=name,
            )
        gets = "not trained on" if self.config.failed_score is None else f"score {self.config.failed_score}"
        for row in rows[:SHOWN_FAILURES]:
            logger.warning(
                "reward function %r failed for %d of %d samples (%s). Sample %d: %s. %s",
                name,
                len(rows),
                len(samples),
                gets,
                row,
                outcomes[row].error,
                description_of(samples[row]),
            )


def check_functions(config: RewardsConfig) -> None:
    """Raise ConfigError if there is no reward function."""
    if not config.functions:
        raise ConfigError(
            "rewards.functions is empty: add one, such as rewards.functions.mine.function=rewards.py:score",
            key="rewards.functions",
        )
