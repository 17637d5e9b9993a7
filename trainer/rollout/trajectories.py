"""Generation by trajectory: any number of responses in flight, which join and leave at any time.

A response is one request to an engine after another: the first, one for each later turn, and one for the rest if an
engine answers with a part. Engines that take requests, such as vLLM's, generate by themselves behind a ``Router``. A
group without engines, such as one of Megatron's ranks, generates with the ``ReferenceEngine``, step by step.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from mcontroller.config.checks import close_names
from mcontroller.errors import ConfigError, DataError
from trainer.columns import LOG_PROBS
from trainer.rollout.reference_engine import ReferenceEngine
from trainer.rollout.requests import Request, RoutedEngines, Router
from trainer.rollout.seeds import count_call, seed_of
from trainer.rollout.trajectory import ARRAYS, IN_FLIGHT, Trajectory
from workers.columns import HELD_OUT_BATCH, ROUTED_EXPERTS, TOKEN_TEMPERATURES
from workers.config.sampling import OF_BATCHES, checked_setting
from workers.generate.batch_requests import experts_of_rows
from workers.generate.engine_protocol import Engine, Sampled
from workers.generate.request_settings import checked_sampling, checked_token_ids

SAMPLING = ("eos_token_id", "pad_token_id", *OF_BATCHES, HELD_OUT_BATCH)
"""The settings that a rollout has for its requests."""


class Submitted(Request):
    """A trajectory in flight: ``await`` it, or call ``result()``; ``cancel()`` takes it out of its engine.

    Args:
        rollout: that it was submitted to.
        trajectory: its state, to which every answer of an engine adds.
        limit: [tokens] the most of the response at the end of this turn.
        room: [tokens] the most of the whole response.
        stop_token_ids: the tokens that end this turn, and leave the response open.
        settings: the ``meta_info`` of its requests.
        temperature: of its tokens; 0 if it takes the most probable ones among others that are sampled.
        seed, streams: see ``Request``.

    Attributes:
        trajectory: as passed.
    """

    def __init__(
        self,
        rollout: TrajectoryRollout,
        trajectory: Trajectory,
        limit: int,
        room: int,
        stop_token_ids: frozenset[int],
        settings: Mapping[str, Any],
        temperature: float,
        seed: int,
        *,
        streams: bool,
    ) -> None:
        made, context = len(trajectory.tokens), trajectory.prompt + trajectory.tokens
        super().__init__(context, settings, seed, made, limit - made, streams=streams)
        self._rollout, self.trajectory, self._room = rollout, trajectory, room
        self._stop_token_ids, self._temperature = stop_token_ids, temperature

    def received(self, part: Sampled) -> None:
        """Add tokens of an answer that goes on to the trajectory."""
        self._append(part)
        super().received(part)

    def _append(self, part: Sampled) -> None:
        self._rollout.note_log_probs(part)
        trajectory, start = self.trajectory, 0
        if part.experts is not None:
            known = sum(map(len, trajectory.experts))
            trajectory.experts.append(part.experts[known:])
        log_probs = part.log_probs
        if log_probs is None:
            log_probs = array("d", (0.0,)) * len(part.tokens)
        for version, count in part.versions:
            made = slice(start, start + count)
            trajectory.sampled(part.tokens[made], log_probs[made], version, self._temperature)
            start += count

    def answered(self, answer: Sampled | BaseException) -> bool:
        """Add an answer to the trajectory, and return whether its rest is to be requested."""
        if isinstance(answer, BaseException):
            return super().answered(answer)
        self._append(answer)
        self.trajectory.ended = self._end(self.left - len(answer.tokens))
        if self.trajectory.ended:
            return super().answered(self.trajectory)
        if answer.tokens or answer.is_partial:
            super().received(answer)
            return True
        return super().answered(
            DataError(
                "an engine returned no token before a stop token or the limit, and not is_partial, with which the rest "
                "is requested again",
                field="is_partial",
            )
        )

    def _end(self, left: int) -> str:
        """Return why the trajectory has ended with its last token; empty if it goes on."""
        trajectory = self.trajectory
        if len(trajectory.tokens) == trajectory.turn:  # the engine stopped before the first token of the turn
            return ""
        last = trajectory.tokens[-1]
        if last in self.settings["eos_token_id"]:
            return "turn" if last in self._stop_token_ids else "stop"
        return "" if left > 0 else "length" if len(trajectory.tokens) >= self._room else "max_tokens"

    def result(self, timeout: float | None = None) -> Trajectory:
        """Return the trajectory when it has ended.

        Args:
            timeout: [s] longest time to wait; for trajectories of a rollout that another thread drives.

        Raises:
            CancelledError: it was cancelled.
        """
        engine = self._rollout.stepped
        while engine is not None and not self.done() and engine.step():
            engine.take()
        trajectory: Trajectory = super().result(timeout)
        return trajectory

    def __await__(self) -> Generator[Any, None, Trajectory]:
        if self._rollout.stepped is not None:
            self._rollout.stepped.drive()
        return asyncio.wrap_future(self).__await__()


class TrajectoryRollout:
    """Generates trajectories with a group or with engines: ``submit`` them.

    Args:
        group: its workers have ``generation_limits``, and engines that take requests, or ``generate_sequences`` as the
            ``ReferenceEngine`` calls it.
        driven: whether the program calls ``advance``, or ``start`` and ``take``, in which trajectories end; otherwise
            engines go on by themselves, and with a ``ReferenceEngine`` whoever waits for a trajectory makes the steps.
        trained: whether all responses are to be trained on, so that one that asks for the most probable tokens is
            rejected.
        engines: that take the requests: several, or one ``ReferenceEngine``, which is stepped. None: those of the
            group's workers, or a ``ReferenceEngine`` if they have none.
        sampling: of ``SAMPLING``: ``eos_token_id``, ``pad_token_id``, and settings of ``generate_sequences``.

    Raises:
        ConfigError: a name is not in ``SAMPLING``, or ``response_length`` is not 1 to that of the workers.

    Attributes:
        engine: the ``ReferenceEngine``, or the engines behind a router.
        driven, trained, sampling: as passed.
        limits: of the workers' configuration: ``prompt_length``, ``vocab_size``, ``max_rows``, ``temperature``, and if
            they have them ``n``, ``do_sample`` and ``seed``; and ``response_length``, of ``sampling`` if it has one.
        submissions: the number of trajectories that were submitted without a seed, on which the next seed depends.
        log_probs: the name of the column with log-probabilities that an engine returned last; None: there was none.
    """

    def __init__(
        self,
        group: Any,
        *,
        driven: bool = False,
        trained: bool = False,
        engines: Sequence[Engine] | None = None,
        **sampling: Any,
    ) -> None:
        for name in sampling:
            if name not in SAMPLING:
                raise ConfigError(
                    f"TrajectoryRollout has no setting {name!r}{close_names(name, SAMPLING)}; possible: "
                    + ", ".join(SAMPLING),
                    key=name,
                    value=sampling[name],
                )
        self.group, self.sampling, self.driven, self.trained = group, sampling, driven, trained
        limits: Mapping[str, Any] = group.generation_limits()[0]
        self.limits: Mapping[str, Any] = {**limits, "response_length": _response_length(sampling, limits)}
        self.engine: ReferenceEngine | RoutedEngines
        if engines is not None and len(engines) == 1 and isinstance(engines[0], ReferenceEngine):
            self.engine = engines[0]
        elif engines is None and not self.limits.get("takes_requests"):
            self.engine = ReferenceEngine(group, limits=limits)
        else:
            self.engine = RoutedEngines(group, engines, driven=driven, vocab_size=self.limits["vocab_size"])
        self.submissions = 0
        self.log_probs: str | None = LOG_PROBS[0]
        self._sampled_before: int | None = None
        self._basis: dict[str, Any] = {}
        self._settings: dict[frozenset[int], Mapping[str, Any]] = {}
        self._in_flight: WeakValueDictionary[int, Submitted] = WeakValueDictionary()

    def __len__(self) -> int:
        """The number of trajectories in flight."""
        return len(self.engine.requests())

    def meta_info(self, n: int) -> dict[str, Any]:
        """Return the ``meta_info`` of a batch of trajectories, ``n`` for each problem."""
        return {"temperature": self.limits["temperature"], **self._basis, **self.sampling, "n": n}

    @property
    def seed(self) -> int:
        """The seed of the run, from which those of the responses are mixed."""
        seed: int = self.sampling.get("seed", self.limits.get("seed", 0))
        return seed

    @property
    def stepped(self) -> ReferenceEngine | None:
        """The engine of which whoever waits for a trajectory has to make steps."""
        return self.engine if not self.driven and isinstance(self.engine, ReferenceEngine) else None

    @property
    def router(self) -> Router | None:
        """The router before the engines, once there was a request; None with a ``ReferenceEngine``."""
        return self.engine.router if isinstance(self.engine, RoutedEngines) else None

    def submit(
        self,
        prompt: Sequence[int] | Trajectory,
        *,
        stop_token_ids: Collection[int] = frozenset(),
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        stream: bool = False,
        **settings: Any,
    ) -> Submitted:
        """Generate a response, or the next turn of one, and return it before it has arrived.

        Args:
            prompt: token ids of the prompt; or a trajectory, which is continued in place. A trajectory goes on with the
                random numbers of its ``seed``. If it has none, or is a copy of one that was submitted, it gets a seed
                from that of the run and the number of trajectories submitted before.
            stop_token_ids: tokens that end the turn, beside the stop tokens.
            eos_token_id: the stop tokens; None: those of the rollout.
            pad_token_id: None: that of the rollout.
            stream: whether the trajectory grows while an engine generates. Otherwise it grows by whole answers, which
                costs the controller less; those of a ``ReferenceEngine`` are its steps.
            settings: of ``sampling.OF_REQUESTS``: changes of ``temperature``, ``top_p`` and so on; ``seed``, of the
                random numbers, 64 bits, signed; ``response_length``, [tokens] the most of the whole response, by
                default and at most that of ``limits``; ``max_tokens``, [tokens] the most of this turn.

        Raises:
            DataError: the prompt is empty or too long, a token is not in the vocabulary, the response has no room, a
                setting is unknown, missing or invalid, the most probable tokens are to be trained on, or the trajectory
                is in flight.
        """
        checked, vocab_size = checked_sampling(settings), self.limits["vocab_size"]
        trajectory = (
            prompt if isinstance(prompt, Trajectory) else Trajectory(checked_token_ids("prompt", prompt, vocab_size))
        )
        stops = frozenset(checked_token_ids("stop_token_ids", stop_token_ids, vocab_size))
        seed, most = checked.pop("seed", None), checked.pop("max_tokens", None)
        room = min(checked.pop("response_length", self.limits["response_length"]), self.limits["response_length"])
        self._check(trajectory, room)
        limit = room if most is None else min(room, len(trajectory.tokens) + most)
        for name, value in (("eos_token_id", eos_token_id), ("pad_token_id", pad_token_id)):
            if value is not None:
                ids = checked_token_ids(name, [value] if isinstance(value, int) else value, vocab_size)
                checked[name] = ids[0] if name == "pad_token_id" else ids.tolist()
        settings_of_all, temperature = self._settings_of(stops, checked), self._temperature(checked)
        if seed is None:
            is_copy = trajectory.seeded not in (None, id(trajectory))
            seed = self._next_seed() if trajectory.seed is None or is_copy else trajectory.seed
        trajectory.seed, trajectory.seeded, trajectory.ended = seed, id(trajectory), ""
        submitted = Submitted(self, trajectory, limit, room, stops, settings_of_all, temperature, seed, streams=stream)
        self._in_flight[id(trajectory)] = submitted
        self.engine.start(submitted)
        return submitted

    def _settings_of(self, stops: frozenset[int], changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the ``meta_info`` of a request; without changes the same object for the same stop tokens."""
        if not changes and stops in self._settings:
            return self._settings[stops]
        settings = {**self.sampling, **changes}
        if missing := [name for name in ("eos_token_id", "pad_token_id") if name not in settings]:
            text = f"a request has no {' and no '.join(missing)}: pass it to submit or to TrajectoryRollout"
            raise DataError(text, missing=missing)
        eos = settings["eos_token_id"]
        settings["eos_token_id"] = sorted({eos, *stops} if isinstance(eos, int) else {*eos, *stops})
        if not changes:
            self._settings[stops] = settings
        return settings

    def _temperature(self, changes: Mapping[str, Any]) -> float:
        """Return the temperature that the tokens of a request are scored at: see ``Submitted``.

        Raises:
            DataError: it takes the most probable tokens, and all responses are to be trained on.
        """
        usual = {"do_sample": True, **self.limits, **self.sampling}
        if usual["do_sample"] and not changes.get("do_sample", True):
            if self.trained:
                raise DataError(
                    "a request takes the most probable token (temperature 0, top_p 0 or do_sample=False), and its "
                    "response is to be trained on as a sample: ask for a temperature above 0; validation may be greedy",
                    field="temperature",
                    value=0.0,
                )
            return 0.0
        temperature: float = {**usual, **changes}["temperature"]
        return temperature

    def start(self, requests: Sequence[Request] | None = None, tokens: int | None = None) -> bool:
        """Let the engines go on, and return whether a request is in flight; see ``ReferenceEngine.step``."""
        return self.engine.step(requests, tokens)

    def ready(self) -> bool:
        """Whether ``take`` would not wait."""
        return self.engine.ready()

    def take(self) -> None:
        """Wait for answers of the engines; those who wait for the trajectories that have ended go on.

        Raises:
            GroupError: the group failed.
        """
        self.engine.take()

    def advance(self) -> None:
        """Make one step."""
        if self.start():
            self.take()

    def note_log_probs(self, sampled: Sampled) -> None:
        """Remember what the log-probabilities of an answer are of."""
        if sampled.basis is not None:
            self.log_probs, self._basis = LOG_PROBS[1], {LOG_PROBS[1]: dict(sampled.basis)} if sampled.basis else {}
        elif self.log_probs != LOG_PROBS[1]:  # once some are the engine's, those of a batch are not the policy's
            self.log_probs = None if sampled.log_probs is None else LOG_PROBS[0]

    def _next_seed(self) -> int:
        if self._sampled_before is None:
            self._sampled_before = count_call(self.group, self.sampling)
        self.submissions += 1
        return seed_of(self.seed, "submit", self._sampled_before, self.submissions)

    def _check(self, trajectory: Trajectory, limit: int) -> None:
        before = self._in_flight.get(id(trajectory))
        if before is not None and not before.done():
            raise DataError(IN_FLIGHT, field="prompt")
        length, most = len(trajectory.prompt), self.limits["prompt_length"]
        for tokens in (trajectory.prompt, trajectory.tokens):
            least_and_greatest = [min(tokens, default=0), max(tokens, default=0)]
            if not 0 <= least_and_greatest[0] <= least_and_greatest[1] < self.limits["vocab_size"]:
                checked_token_ids("prompt", least_and_greatest, self.limits["vocab_size"])
        if not 1 <= length <= most:
            raise DataError(
                f"submit: the prompt has {length} tokens, expected 1 to rollout.prompt_length, which is {most}",
                length=length,
            )
        lengths = {name: len(getattr(trajectory, name)) for name in ARRAYS if name != "prompt"}
        if len({*lengths.values()}) > 1:
            raise DataError(f"submit: the trajectory has {lengths}; expected one of each for every token", **lengths)
        if len(trajectory.tokens) >= limit:
            raise DataError(
                f"submit: the response has {len(trajectory.tokens)} tokens already, and the most are {limit}: end it "
                "before there is no room for a turn, or raise rollout.response_length",
                length=len(trajectory.tokens),
            )


def trajectory_batch(
    trajectories: Sequence[Trajectory],
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
    log_probs: str | None = "rollout_log_probs",
) -> dict[str, Tensor]:
    """Return the columns of ``generate_sequences`` that are read, and two that show when responses were made.

    Args:
        trajectories: the rows.
        prompt_length: [tokens] columns of the prompts; more if a prompt is longer.
        response_length: [tokens] columns of the responses.
        pad_token_id: fills the prompts on the left and the responses on the right.
        log_probs: the name of the column with log-probabilities; None: there is none.

    Returns:
        ``response_mask`` int8 is 0 for the environment's tokens, which are in ``attention_mask`` int8. ``truncated``,
        bool ``[rows]``: whether a response ended for lack of room or turns. ``policy_version`` int64 ``[rows]`` is that
        of a row's oldest token, or the newest of all if it has none; ``token_versions`` int32 ``[rows, response]`` that
        of each token, -1 for those not sampled. ``token_temperatures`` float32 ``[rows, response]`` is the temperature
        of each token, at which workers score it.
    """
    rows = len(trajectories)
    prompt_length = max([prompt_length, *(len(trajectory.prompt) for trajectory in trajectories)])
    ids = np.full((rows, prompt_length + response_length), pad_token_id)
    attended, mask = np.zeros(ids.shape, np.int8), np.zeros((rows, response_length), np.int8)
    versions, scores = np.full(mask.shape, -1, np.int32), np.zeros(mask.shape, np.float32)
    temperatures = np.ones(mask.shape, np.float32)
    for row, trajectory in enumerate(trajectories):
        length, start = len(trajectory.tokens), prompt_length - len(trajectory.prompt)
        end = prompt_length + length
        ids[row, start:end] = trajectory.prompt + trajectory.tokens
        attended[row, start:end] = 1
        mask[row, :length] = trajectory.mask
        versions[row, :length] = trajectory.versions
        scores[row, :length] = trajectory.log_probs
        temperatures[row, :length] = trajectory.temperatures
    oldest = versions.view(np.uint32).min(1).view(np.int32).astype(np.int64)  # without sign, -1 is the greatest
    oldest[oldest < 0] = versions.max(initial=0)
    # numpy asks for huge pages, so that writing to new memory is several times faster than in torch's
    parts = {"prompts": ids[:, :prompt_length], "responses": ids[:, prompt_length:], "response_mask": mask}
    parts |= {"input_ids": ids, "attention_mask": attended}
    whole = {name: torch.from_numpy(column) for name, column in parts.items()}
    whole["truncated"] = torch.tensor([trajectory.ended == "length" for trajectory in trajectories])
    whole |= {"policy_version": torch.from_numpy(oldest), "token_versions": torch.from_numpy(versions)}
    whole[TOKEN_TEMPERATURES] = torch.from_numpy(temperatures)
    if log_probs is not None:
        whole[log_probs] = torch.from_numpy(scores)
    if any(trajectory.experts for trajectory in trajectories):
        whole[ROUTED_EXPERTS] = _experts(trajectories, prompt_length, response_length)
    return whole


def _experts(trajectories: Sequence[Trajectory], prompt_length: int, response_length: int) -> Tensor:
    """Return the column ``routed_experts`` of whole responses; -1 for tokens that have none."""
    none = next(trajectory.experts[0][:0] for trajectory in trajectories if trajectory.experts)
    experts = [torch.cat([none, *trajectory.experts]) for trajectory in trajectories]
    starts = [prompt_length - len(trajectory.prompt) for trajectory in trajectories]
    return experts_of_rows(experts, starts, prompt_length + response_length)


def _response_length(sampling: Mapping[str, Any], limits: Mapping[str, Any]) -> int:
    """Return the most tokens of the responses of a rollout."""
    most: int = limits["response_length"]
    value = sampling.get("response_length", most)
    length: int | None = checked_setting("response_length", value)
    if length is None or length > most:
        raise ConfigError(
            f"response_length of TrajectoryRollout is {value!r}; expected 1 to {most}, rollout.response_length",
            key="response_length",
            value=value,
        )
    return length
