"""Responses to problems: from one call of the rollout or a program's own function, also ahead of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError
from mcontroller.group import WorkerGroup
from trainer.columns import RESPONSE_COLUMNS, columns
from trainer.config import TrainerConfig
from trainer.data.stream import BatchStream
from trainer.metrics import Metrics
from trainer.rollout.episodes import Episodes
from trainer.saving.run_record import BatchInFlight, RunState
from trainer.stages import Stages
from workers.role_worker import RoleWorker

BATCH_NUMBER = "batch_number"
"""Key of the ``meta_info`` of a batch of problems: its number in the sequence of the data set."""

ASYNCHRONOUS = "asynchronous"
"""Key of the state of sampling of a checkpoint with responses in flight by trajectory."""

VERSION = "policy_version"
"""Column of the version of the policy that generated each row, int64 ``[rows]``."""
GenerateSequences = Callable[[DataProto], DataProto]
"""``generate_sequences`` of the rollout's group."""
RolloutFunction = Callable[[DataProto, GenerateSequences], DataProto]
"""A program's own rollout loop: generates the responses to problems with calls of the rollout.

It gets problems: ``input_ids`` and ``attention_mask`` ``[rows, prompt]``, the other columns of the data set, and the
``meta_info`` of ``generate_sequences``. It returns a batch with the columns of ``generate_sequences``, ``n`` rows for
each problem next to each other, in the order of the problems. ``response_mask`` is 1 for the tokens that the policy
sampled, which are trained on; ``attention_mask`` is 1 for all tokens of a response. It may add ``truncated``, bool
``[rows]``: whether a response was cut off; without it, those are the responses that do not end with a stop token.
"""


class RolloutWeights:
    """Sends the weights of the actor to the group that generates, if they have changed since the last time.

    The transfer is a ``workers.WeightTransfer``, unless the actor's worker class overrides ``open_transfer``. Without a
    group that only generates, nothing is sent.

    Args:
        stages: the stage ``weights`` gets the seconds.
        config: has the name of the transport, and the seconds after which a transfer fails.

    Attributes:
        moving: the context in which the weights are sent.
    """

    def __init__(self, stages: Stages, config: TrainerConfig) -> None:
        self._stages = stages
        self._config = config
        self._groups: tuple[WorkerGroup[Any], WorkerGroup[Any]] | None = None
        self._transfer: Any = None
        self._stale = True
        self._metrics = Metrics()
        self._report: Any = None
        self._generating: DataProto | None = None
        self.moving: Callable[[], AbstractContextManager[None]] = nullcontext

    def connect(self, actor: WorkerGroup[Any], rollout: WorkerGroup[Any]) -> None:
        """Send from ``actor`` to ``rollout`` from now on; do nothing if they are the same group."""
        self._transfer = self._generating = None
        self._metrics = Metrics()
        if rollout is not actor:
            self._groups, self._stale = (actor, rollout), True

    @property
    def sends(self) -> bool:
        """Whether a separate group generates."""
        return self._groups is not None

    def changed(self) -> None:
        """Send the weights before the next generation: the policy has changed."""
        self._stale = True

    def wait_for(self, generating: DataProto) -> None:
        """Do not send weights before this generation has ended."""
        self._generating = generating

    @property
    def version(self) -> int:
        """The version of the policy that was sent last."""
        version: int = self._report.policy_version
        return version

    @property
    def fingerprint(self) -> int | None:
        """The fingerprint of the weights that were sent last; None if they were not verified."""
        fingerprint: int | None = self._report.fingerprint
        return fingerprint

    def update(self) -> None:
        """Send the weights now, if the policy has changed; first wait for the generation in flight."""
        if self._groups is None or not (self._stale or self._are_lost(self._groups[1])):
            return
        if self._generating is not None:
            with self._stages("generate"):
                self._generating.check()
            self._generating = None
        actor, rollout = self._groups
        with self.moving(), self._stages("weights", actor.send_weights):
            if self._transfer is None:
                sender: type[RoleWorker] = actor.worker_cls
                self._transfer = sender.open_transfer(actor, rollout, timeout=self._config.weight_timeout)
            self._report = self._transfer.run()
            self._metrics.add(self._report.metrics())
        self._stale = False

    def _are_lost(self, rollout: WorkerGroup[Any]) -> bool:
        """Whether an engine has slept since it got the weights, so that another group had the memory of its GPUs."""
        return self._stages.devices.are_shared(rollout) and not rollout.has_weights()

    def take_metrics(self) -> dict[str, float]:
        """Return what the transfers since the last call cost."""
        return self._metrics.take()

    def close(self) -> None:
        """End the connections between the groups."""
        if self._transfer is not None:
            self._transfer.close()


def responses_to(
    problems: DataProto, rollout: WorkerGroup[Any], sampling: Mapping[str, Any], rollout_fn: RolloutFunction | None
) -> DataProto:
    """Return the responses to problems: of a call of the rollout, which goes on, or of a program's own rollout loop.

    Args:
        problems: rows of ``input_ids`` and ``attention_mask`` ``[prompt]``, and other columns.
        rollout: the group that generates.
        sampling: the ``meta_info`` of ``generate_sequences``.
        rollout_fn: the loop; None: there is none.

    Raises:
        DataError: ``rollout_fn`` returned a row with another prompt than that of its problem, or too few rows.
    """
    others: list[str] | None = [] if rollout_fn is None else None
    argument = problems.select(["input_ids", "attention_mask"], non_tensor_batch_keys=others)
    argument.meta_info = dict(sampling)
    if rollout_fn is None:
        in_flight: DataProto = rollout.generate_sequences.options(blocking=False)(argument)
        return in_flight
    responses = rollout_fn(argument, rollout.generate_sequences)
    if not isinstance(rollout_fn, Episodes):  # which may write prompts of their own
        _check_prompts(responses, problems)
    return responses


def _check_prompts(responses: DataProto, problems: DataProto) -> None:
    """Raise DataError for the first row that does not have the prompt of its problem, both padded on the left."""
    n = -(-len(responses) // len(problems))
    given, attended, answers = columns(responses, "input_ids", "attention_mask", "responses")
    ids, mask = columns(problems, "input_ids", "attention_mask")
    width = max(ids.shape[1], given.shape[1] - answers.shape[1])
    expected = _prompts(ids, mask, ids.shape[1], width).repeat_interleave(n, 0)
    prompts = _prompts(given, attended, given.shape[1] - answers.shape[1], width)
    wrong = (prompts != expected[: len(prompts)]).any(1).nonzero().flatten().tolist()
    if wrong or len(prompts) < len(expected):
        row = wrong[0] if wrong else len(prompts)
        problem = "has another prompt than" if wrong else "is missing; it has the prompt of"
        raise DataError(
            f"rollout_fn returned {len(responses)} rows for {len(problems)} problems, and row {row} {problem} problem "
            f"{row // n}, which is scored there: return equally many rows for each problem, next to each other, in the "
            "order of the problems, with their prompts unchanged",
            row=row,
            rows=len(responses),
            problems=len(problems),
        )


def _prompts(ids: Tensor, mask: Tensor, columns_of_prompt: int, width: int) -> Tensor:
    """Return the token ids of prompts, int64 ``[rows, width]``, padded on the left with -1."""
    kept = ids[:, :columns_of_prompt].masked_fill(mask[:, :columns_of_prompt] == 0, -1)
    return pad(kept, (width - columns_of_prompt, 0), value=-1)


class GeneratedBatch(NamedTuple):
    """Responses to problems.

    Attributes:
        problems: the problems, with the non-tensor column ``uid``.
        responses: the columns of ``generate_sequences``.
        memory: metrics of the memory that generation used.
    """

    problems: DataProto
    responses: DataProto
    memory: Mapping[str, float] = MappingProxyType({})

    @property
    def problem_columns(self) -> DataProto:
        """The problems' non-tensor columns, repeated for each response."""
        others = self.problems.select([], non_tensor_batch_keys=None)
        return others.repeat(len(self.responses) // len(self.problems))


@dataclass(frozen=True)
class _Generation:
    """A batch whose responses are being generated, or have been."""

    number: int | None
    problems: DataProto
    responses: DataProto
    memory: Callable[[], dict[str, float]]


class Generations:
    """The responses to train on, of which ``ahead`` batches are generated while the policy learns from earlier ones.

    A batch is started with the newest weights, after the batch before it: the rollout's group is never updated while it
    generates. With ``ahead=0``, a batch is taken right after it was started.

    Args:
        ahead: batches in flight while the policy learns.
        stages: the stage ``generate`` gets the seconds in which the controller waits for responses.
        weights: sends the weights before a batch is started.
    """

    def __init__(self, ahead: int, stages: Stages, weights: RolloutWeights) -> None:
        self._ahead = ahead
        self._stages = stages
        self._weights = weights
        self._queue: deque[_Generation] = deque()
        self._next_uid = 0
        self._rollout: Any = None
        self._sampling: Mapping[str, Any] = {}
        self._rollout_fn: RolloutFunction | None = None

    def connect(
        self, rollout: WorkerGroup[Any], sampling: Mapping[str, Any], rollout_fn: RolloutFunction | None
    ) -> None:
        """Generate with a group from now on; see ``responses_to``."""
        self._rollout, self._sampling, self._rollout_fn = rollout, sampling, rollout_fn

    def __len__(self) -> int:
        return len(self._queue)

    def problems_in_flight(self) -> dict[int, list[int]]:
        """Return which problems of which batches of the data set were drawn and not trained on."""
        return {batch.number: list(range(len(batch.problems))) for batch in self._queue if batch.number is not None}

    def exchange(self, problems: DataProto, draw: Callable[[], DataProto]) -> GeneratedBatch:
        """Start to generate with the newest weights, and return the responses of the oldest batch.

        Args:
            problems: rows of ``input_ids`` and ``attention_mask`` ``[prompt]``.
            draw: returns the next problems, as long as fewer than ``ahead`` batches are in flight.

        Raises:
            ConfigError: no group generates yet.
            DataError: the batch has another size than those in flight.
        """
        self._start(problems)
        while len(self._queue) <= self._ahead:
            self._start(draw())
        oldest = self._queue.popleft()
        reads = (*RESPONSE_COLUMNS, VERSION) if self._ahead else RESPONSE_COLUMNS
        with self._stages("generate"):
            responses = oldest.responses.prefetch(reads)
        return GeneratedBatch(oldest.problems, responses, oldest.memory())

    def _start(self, problems: DataProto) -> None:
        """Start to generate responses with the newest weights; only a ``rollout_fn`` is waited for."""
        if self._rollout is None:
            raise ConfigError("no group generates yet: call init_workers() before train_step()", key="rollout")
        self._check_size(problems, [batch.problems for batch in self._queue])
        number = self._numbered(problems)
        self._weights.update()
        with self._stages("generate", self._rollout.generate_sequences):
            responses = responses_to(problems, self._rollout, self._sampling, self._rollout_fn)
        memory: Callable[[], dict[str, float]] = dict
        if self._ahead:
            memory = self._stages.ask_memory([self._rollout.name])
            self._weights.wait_for(responses)
        self._queue.append(_Generation(number, problems, responses, memory))

    def _check_size(self, problems: DataProto, in_flight: Sequence[DataProto]) -> None:
        """Raise DataError unless a batch of problems has the size of those in flight."""
        if in_flight and len(problems) != len(in_flight[0]):
            raise DataError(
                f"a batch of {len(problems)} problems, and one in flight has {len(in_flight[0])}: with "
                f"trainer.max_staleness={self._ahead} all batches of a run have one size",
                rows=len(problems),
                expected=len(in_flight[0]),
            )

    def close(self) -> None:
        """End the processes that generation started."""

    def take_metrics(self) -> dict[str, float]:
        """Return what was counted since the last call, in all draws of a step."""
        return {}

    def summary(self) -> str:
        """Return a line for the end of the run; empty if there is nothing to say."""
        return ""

    def state(self) -> tuple[tuple[BatchInFlight, ...], Mapping[str, Any]]:
        """Wait for the batches in flight; return them with all their columns, and the state of the group's sampling.

        Raises:
            DataError: a batch was not drawn from the data set of the run, which has to draw its problems again.
        """
        saved = []
        for batch in self._queue:
            if batch.number is None:
                raise not_drawn()
            saved.append(BatchInFlight(batch.number, batch.responses.slice().get()))
        return tuple(saved), self._sampling_state()

    def _sampling_state(self) -> Mapping[str, Any]:
        if not self._weights.sends:
            return {}
        state: Mapping[str, Any] = self._rollout.sampling_state()[0]
        return state

    def restore(
        self,
        saved: Sequence[BatchInFlight],
        sampling: Mapping[str, Any],
        problems: Callable[[int], DataProto],
    ) -> int:
        """Continue with saved batches and return how many are in flight again: none without ``ahead``.

        Args:
            saved: the batches in flight of a checkpoint.
            sampling: the state of the group's sampling; empty: that of a new run.
            problems: returns a batch of problems by its number in the data set.
        """
        if ASYNCHRONOUS in sampling:
            raise self._too_far_ahead(sampling)
        if sampling and self._weights.sends:
            self._rollout.restore_sampling(sampling)
        self._queue.clear()
        if not self._ahead:
            return 0
        for batch in saved:
            batch_problems = problems(batch.number)
            self._numbered(batch_problems)
            self._queue.append(_Generation(batch.number, batch_problems, batch.responses, dict))
        return len(saved)

    def _too_far_ahead(self, sampling: Mapping[str, Any]) -> ConfigError:
        """Return the error of a checkpoint with responses in flight that this run cannot continue."""
        saved_ahead = sampling[ASYNCHRONOUS]["max_staleness"]
        if saved_ahead <= self._ahead:
            return ConfigError(
                f"the checkpoint has responses of several turns in flight, and with "
                f"trainer.max_staleness={self._ahead} this run continues whole batches of one turn: resume with the "
                "section multi_turn that it was saved with, or with trainer.max_staleness=2",
                key="multi_turn",
                value=None,
            )
        return ConfigError(
            f"trainer.max_staleness is {self._ahead}, and the checkpoint has responses in flight of {saved_ahead}: "
            f"resume with trainer.max_staleness={saved_ahead} or more",
            key="trainer.max_staleness",
            value=self._ahead,
        )

    def _numbered(self, problems: DataProto) -> int | None:
        """Give every problem a ``uid``, and return the number of the batch in the data set, if it has one."""
        uid = np.arange(self._next_uid, self._next_uid + len(problems))
        problems.non_tensor_batch["uid"] = uid.astype(object)
        self._next_uid += len(problems)
        number: int | None = problems.meta_info.pop(BATCH_NUMBER, None)
        return number


def not_drawn() -> DataError:
    """Return the error of saving a batch in flight that cannot be drawn again."""
    return DataError(
        "a batch in flight cannot be saved: its problems were passed to train_step, and were not drawn with draw(), so "
        "a run that resumes cannot draw them again. Set trainer.max_staleness=0"
    )


def staleness_metrics(batch: DataProto, newest: int) -> dict[str, float]:
    """Return how many updates of the policy the rows of a batch are behind: ``training/staleness_mean`` and ``_max``.

    Args:
        batch: ``policy_version`` int64 ``[rows]``.
        newest: the version of the policy before its next update.

    Raises:
        DataError: the batch has no ``policy_version``.
    """
    (version,) = columns(batch, VERSION)
    behind = newest - version.to(torch.float64)
    return {"training/staleness_mean": float(behind.mean()), "training/staleness_max": float(behind.max())}


class ProblemStream:
    """The position of a run in its data.

    Args:
        batches: the training data.
        generations: has the problems in flight.

    Attributes:
        count: batches that were drawn.
    """

    def __init__(self, batches: BatchStream, generations: Generations) -> None:
        self.batches = batches
        self.generations = generations
        self.count = 0

    def draw(self) -> DataProto:
        """Return the next batch of problems."""
        problems = self.batches[self.count]
        problems.meta_info[BATCH_NUMBER] = self.count
        self.count += 1
        return problems

    @property
    def rows_trained_on(self) -> int:
        """The number of rows that were drawn and are not in flight, with those that ended passes left out."""
        return self.batches.position(self.count) - sum(map(len, self.generations.problems_in_flight().values()))

    def are_left(self, epochs: int) -> bool:
        """Return whether so many passes over the data have another batch."""
        return self.rows_trained_on + self.batches.batch_size <= epochs * len(self.batches.dataset)

    def state(self, in_flight: Sequence[BatchInFlight]) -> dict[str, Any]:
        """Return the fields of ``RunState`` that say where the run is in its data.

        Args:
            in_flight: the batches in flight, with their responses; none if these cannot be saved: then their rows are
                drawn again.
        """
        saved = tuple(replace(batch, rows=tuple(self.batches.rows(batch.number))) for batch in in_flight)
        lost = () if saved else self.generations.problems_in_flight()
        number = min(lost, default=self.count)
        return {
            "drawn_batches": number,
            "in_flight": saved,
            "next_row": self.batches.rows(number)[0] if lost else self.batches.position(number),
            "batch_size": self.batches.batch_size,
        }

    def continue_from(self, state: RunState) -> None:
        """Continue with a state: its batches in flight, and then the rows that were not drawn.

        Batches in flight that cannot be continued, such as those of another size, are drawn again.
        """
        rows = {batch.number: batch.rows for batch in state.in_flight}
        in_flight = state.in_flight if state.batch_size == self.batches.batch_size else ()
        self.batches.resume(state.drawn_batches, state.next_row, rows)
        kept = self.generations.restore(in_flight, state.rollout, self.batches.__getitem__)
        self.count = state.drawn_batches
        if rows and not kept:
            self.count = min(rows)
            self.batches.resume(self.count, rows[self.count][0])
