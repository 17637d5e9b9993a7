"""Generation by trajectory: any number of responses in flight, which join and leave at any time.

Engines that take requests, such as vLLM's, get each trajectory by itself through a ``Router``, and go on by themselves.
With Megatron's ranks, the workers keep nothing between calls: a trajectory in flight is a prompt and the tokens so far,
and a slice is one call of ``generate_sequences`` that continues all of them by some tokens. The noise of a token
depends on the seed of its trajectory and on its position, so a response made in slices equals one made at once. Weights
move between two slices.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from array import array
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.batch import DataProto
from mcontroller.errors import DataError, MControllerError
from trainer.columns import columns
from trainer.rollout.engine import Engine, Sampled
from trainer.rollout.router import NoEngineLeft, RequestLoop, Router
from trainer.rollout.seeds import count_call, seed_of
from trainer.rollout.trajectory import Trajectory
from workers.columns import ROUTED_EXPERTS, TOKEN_TEMPERATURES
from workers.generate.request_settings import OF_REQUESTS, checked_sampling, checked_token_ids
from workers.generate.sampling import later_seeds

LOG_PROBS = ("rollout_log_probs", "engine_log_probs")
"""The columns with a log-probability for each token; a rollout returns one of them."""
_OF_ENGINES = ("eos_token_id", *(name for name in OF_REQUESTS if name != "max_tokens"))
_TAKE_S = 0.02
SLICE_TOKENS = 64
"""[tokens] The most by which a slice continues a trajectory."""


class Submitted(Future[Trajectory]):
    """A trajectory in flight: ``await`` it, or call ``result()``; ``cancel()`` takes it out before the next slice.

    Unless a program makes the slices itself (``TrajectoryRollout.driven``), whoever waits makes them.

    Attributes:
        trajectory: its state, which every slice continues.
        limit: [tokens] the most of the response at the end of this turn.
        room: [tokens] the most of the whole response.
        stop_token_ids: the tokens that end this turn, and leave the response open.
        settings: the ``meta_info`` of its calls; trajectories with equal settings share a call.
        temperature: of its tokens; 0 if it takes the most probable ones among others that are sampled; None if the
            workers do not say.
        key: what the program knows it by.
        reconnected: whether its request was sent again because no engine could be reached, and has no answer yet.
    """

    key: Any = None
    request: Future[Sampled] | None = None
    reconnected: bool = False

    def __init__(
        self,
        rollout: TrajectoryRollout,
        trajectory: Trajectory,
        limit: int,
        room: int,
        stop_token_ids: frozenset[int],
        settings: Mapping[str, Any],
        temperature: float | None,
    ) -> None:
        super().__init__()
        self.trajectory, self.limit, self.room, self.stop_token_ids = trajectory, limit, room, stop_token_ids
        self.settings, self.temperature, self._rollout = settings, temperature, rollout

    def end(self) -> str:
        """Return why the trajectory has ended with its last token; empty if it goes on."""
        last = self.trajectory.tokens[-1]
        if last in self.settings["eos_token_id"]:
            return "turn" if last in self.stop_token_ids else "stop"
        length = len(self.trajectory.tokens)
        return "" if length < self.limit else "length" if length >= self.room else "max_tokens"

    def cancel(self) -> bool:
        """Take it out of its engine, or before the next slice; return whether it had not ended."""
        self._rollout.some_cancelled = True
        if self.request is not None:
            self.request.cancel()
        return super().cancel()

    def result(self, timeout: float | None = None) -> Trajectory:
        """Return the trajectory when it has ended.

        Args:
            timeout: [s] longest time to wait; for trajectories of a rollout that another thread drives.

        Raises:
            CancelledError: it was cancelled.
        """
        while not (self.done() or self._rollout.driven or self._rollout.routes):
            self._rollout.advance()
        return super().result(timeout)

    def __await__(self) -> Generator[Any, None, Trajectory]:
        if not (self._rollout.driven or self._rollout.routes):
            self._rollout.drive_on_loop()
        return asyncio.wrap_future(self).__await__()


class TrajectoryRollout:
    """Generates trajectories with a group: ``submit`` them, and advance all of them slice by slice.

    Args:
        group: its workers have ``generate_sequences`` with the columns ``sample_seed`` and ``generated``, and
            ``generation_limits``.
        slice_tokens: the most tokens by which a slice continues a trajectory. None: those of the workers'
            ``generation_limits``, or ``SLICE_TOKENS``.
        capacity: the most rows of a slice; the others wait in the order in which they were submitted. None: the
            engine's ``rollout.max_rows``.
        driven: whether the program calls ``advance``, or ``start`` and ``take``; otherwise whoever waits for a
            trajectory makes the slices.
        trained: whether all responses are to be trained on, so that one that asks for the most probable tokens is
            rejected.
        engines: that take the requests. None: those of the group's workers, if they do.
        sampling: the ``meta_info`` of ``generate_sequences``: ``eos_token_id``, ``pad_token_id``, and settings.

    Attributes:
        routes: whether each trajectory is a request to an engine, and there are no slices.
        router: before the engines, once there was a request.
        driven, slice_tokens, capacity, trained, sampling: as passed.
        limits: of the workers' configuration: ``prompt_length``, ``response_length``, ``vocab_size``, ``max_rows``, and
            if they have them, ``n``, ``temperature``, ``do_sample`` and ``seed``.
        submissions: the number of trajectories that were submitted without a seed, on which the next seed depends.
        some_cancelled: whether some of those in flight may have been cancelled.
        log_probs: the name of the column with log-probabilities that the group returned last; None: there was none.
    """

    def __init__(
        self,
        group: Any,
        *,
        slice_tokens: int | None = None,
        capacity: int | None = None,
        driven: bool = False,
        trained: bool = False,
        engines: Sequence[Engine] | None = None,
        **sampling: Any,
    ) -> None:
        self.group, self.sampling, self.driven, self.trained = group, sampling, driven, trained
        self.limits: Mapping[str, Any] = group.generation_limits()[0]
        self.slice_tokens: int = slice_tokens or self.limits.get("slice_tokens", SLICE_TOKENS)
        self.capacity = capacity or self.limits["max_rows"]
        self.submissions, self.some_cancelled = 0, False
        self._sampled_before: int | None = None
        self.log_probs: str | None = LOG_PROBS[0]
        self._basis: dict[str, Any] = {}
        self._live: dict[Submitted, None] = {}
        self.routes = engines is not None or bool(self.limits.get("takes_requests"))
        self.router: Router | None = None
        self._engines, self._addresses = engines, list[Any]()
        self._requests = RequestLoop() if self.routes else None
        self._unsent: list[Submitted] = []
        self._arrived: SimpleQueue[Submitted] = SimpleQueue()
        self._settings: dict[frozenset[int], Mapping[str, Any]] = {}
        self._calls: list[tuple[list[Submitted], DataProto]] = []
        self._lock = threading.RLock()
        self._driver: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """The number of trajectories in flight."""
        return len(self._live)

    def meta_info(self, n: int) -> dict[str, Any]:
        """Return the ``meta_info`` of a batch of trajectories, ``n`` for each problem."""
        temperature = {"temperature": self.limits["temperature"]} if "temperature" in self.limits else {}
        return {**temperature, **self._basis, **self.sampling, "n": n}

    @property
    def seed(self) -> int:
        """The seed of the run, from which those of the responses are mixed."""
        seed: int = self.sampling.get("seed", self.limits.get("seed", 0))
        return seed

    @property
    def samples(self) -> bool:
        """Whether a request without settings is sampled, and does not get the most probable tokens."""
        return bool(self.sampling.get("do_sample", self.limits.get("do_sample", True)))

    @property
    def live(self) -> Sequence[Submitted]:
        """The trajectories in flight, in the order of their submission."""
        with self._lock:
            if self.some_cancelled:
                self._live = {submitted: None for submitted in self._live if not submitted.done()}
                self.some_cancelled = False
            return tuple(self._live)

    @property
    def started(self) -> list[Submitted]:
        """The trajectories in flight that have tokens, or that an engine has."""
        return [submitted for submitted in self.live if submitted.trajectory.tokens or submitted.request is not None]

    def submit(
        self,
        prompt: Sequence[int] | Trajectory,
        *,
        stop_token_ids: Collection[int] = frozenset(),
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
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
            settings: of ``sampling.OF_REQUESTS``: changes of ``temperature``, ``top_p`` and so on; ``seed``, of the
                random numbers, 64 bits, signed; ``response_length``, [tokens] the most of the whole response, by
                default the workers' ``rollout.response_length``; ``max_tokens``, [tokens] the most of this turn.

        Raises:
            DataError: the prompt is empty or too long, a token is not in the vocabulary, the response has no room, a
                setting is unknown or invalid, or the most probable tokens are to be trained on.
        """
        checked, vocab_size = checked_sampling(settings, self.limits), self.limits["vocab_size"]
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
        submitted = Submitted(
            self, trajectory, limit, room, stops, self._settings_of(stops, checked), self._temperature(checked)
        )
        if seed is None:
            is_copy = trajectory.seeded not in (None, id(trajectory))
            seed = self._next_seed() if trajectory.seed is None or is_copy else trajectory.seed
        trajectory.seed, trajectory.seeded, trajectory.ended = seed, id(trajectory), ""
        with self._lock:
            if self.routes:
                goes_on = bool(self.live) and self.router is not None
                self._unsent.append(submitted)
                self._live[submitted] = None
                if goes_on or not self.driven:
                    self._send_requests(connect=not goes_on)
            else:
                self._live[submitted] = None
        return submitted

    def _settings_of(self, stops: frozenset[int], changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the ``meta_info`` of a request; without changes the same object for the same stop tokens."""
        if not changes and stops in self._settings:
            return self._settings[stops]
        settings = {**self.sampling, **changes}
        settings["eos_token_id"] = sorted({*_token_ids(settings["eos_token_id"]), *stops})
        if not changes:
            self._settings[stops] = settings
        return settings

    def _temperature(self, changes: Mapping[str, Any]) -> float | None:
        """Return the temperature that the tokens of a request are scored at: see ``Submitted.temperature``.

        Raises:
            DataError: it takes the most probable tokens, and all responses are to be trained on.
        """
        if self.samples and not changes.get("do_sample", True):
            if self.trained:
                raise DataError(
                    "a request takes the most probable token (temperature 0, top_p 0 or do_sample=False), and its "
                    "response is to be trained on as a sample: ask for a temperature above 0; validation may be greedy",
                    field="temperature",
                    value=0.0,
                )
            return 0.0 if "temperature" in self.limits else None
        if "temperature" not in self.limits:
            return None
        temperature: float = {**self.meta_info(1), **changes}["temperature"]
        return temperature

    def restart(self, group: Any) -> None:
        """Generate with another group from now on: only the slice in flight is lost, and made again."""
        with self._lock:
            self.group, self._calls, self.router = group, [], None
            self._unsent = list(self.live)
            if self.routes and not self.driven:
                self.start()

    def start(self, chosen: Sequence[Submitted] | None = None) -> bool:
        """Send the calls of a slice, and return whether there is one in flight; trajectories that join later wait.

        Args:
            chosen: which trajectories in flight it continues. None: the first ``capacity``.
        """
        with self._lock:
            if self.routes:
                self._send_requests(connect=len(self._unsent) == len(self.live))
            if self._calls or self.routes:
                return bool(self._calls or self.live)
            rows = list(self.live[: self.capacity] if chosen is None else chosen)
            alike: list[tuple[Mapping[str, Any], list[Submitted]]] = []
            for submitted in rows:
                settings = submitted.settings
                same = next((some for other, some in alike if other is settings or other == settings), None)
                if same is None:
                    alike.append((settings, [submitted]))
                else:
                    same.append(submitted)
            for _, some in alike:
                self._calls.append((some, self._call(some)))
            return bool(self._calls)

    def ready(self) -> bool:
        """Whether ``take`` would not wait."""
        return not self._arrived.empty() if self.routes else all(batch.wait(0.0) for _, batch in self._calls)

    def take(self) -> list[Submitted]:
        """Wait for the slice in flight, and return the trajectories that it has ended, whose waiters go on.

        Raises:
            GroupError: the group failed. Nothing but the slice is lost: the trajectories stay in flight, and the next
                slice makes the same tokens.
        """
        if self.routes:
            return self._take_responses()
        with self._lock:
            calls, self._calls = self._calls, []
            batches = [(rows, batch.get()) for rows, batch in calls]
            for rows, batch in batches:
                limits = [submitted.limit for submitted in rows]
                temperatures = [submitted.temperature for submitted in rows]
                append_sampled([submitted.trajectory for submitted in rows], batch, limits, temperatures)
                if self.log_probs != LOG_PROBS[1]:  # once some are the engine's, those of a batch are not the policy's
                    self.log_probs = log_probs_of(batch)
                self._basis = {name: value for name, value in batch.meta_info.items() if name in LOG_PROBS}
            return self._settled([submitted for rows, _ in batches for submitted in rows])

    def _settled(self, rows: Sequence[Submitted]) -> list[Submitted]:
        """Return those of the rows of a slice that have ended, whose waiters go on."""
        for submitted in rows:
            submitted.trajectory.ended = submitted.end()
        ended = [submitted for submitted in rows if submitted.trajectory.ended]
        with self._lock:
            for submitted in ended:
                self._live.pop(submitted, None)
        completed = [submitted for submitted in ended if submitted.set_running_or_notify_cancel()]
        for submitted in completed:
            submitted.set_result(submitted.trajectory)
        return completed

    def postpone(self, some: Sequence[Submitted]) -> None:
        """Continue these trajectories after all others in flight."""
        with self._lock:
            for submitted in some:
                self._live.pop(submitted)
                self._live[submitted] = None

    def advance(self) -> list[Submitted]:
        """Make one slice, and return the trajectories that it has ended."""
        with self._lock:
            return self.take() if self.start() else []

    def _send_requests(self, *, connect: bool) -> None:
        """Send what waits to the engines, which are brought up to date first if none has a request."""
        unsent, self._unsent = [submitted for submitted in self._unsent if not submitted.done()], []
        if not unsent:
            return
        try:
            if connect or self.router is None:
                self._connect()
        except MControllerError:
            self._unsent = unsent
            raise
        for submitted in unsent:
            self._send_request(submitted)

    def _connect(self) -> None:
        """Use the engines of the group's workers, with their current weights."""
        addresses = (
            [] if self._engines else [address for address in self.group.engine_addresses() if address is not None]
        )
        if self.router is not None and not self.router.lost and addresses == self._addresses:
            return
        self._addresses, engines = addresses, self._engines
        if engines is None:
            from trainer.rollout.vllm_engine import VllmEngine

            engines = [VllmEngine(address, self.sampling["pad_token_id"]) for address in addresses]
            if self.router is not None:
                assert self._requests is not None
                self._requests.start(self.router.close())
        self.router = Router(engines)

    def _send_request(self, submitted: Submitted) -> None:
        assert self.router is not None and self._requests is not None
        trajectory = submitted.trajectory
        made, seed = len(trajectory.tokens), trajectory.seed or 0
        if made:
            seed = int(later_seeds(torch.tensor([seed]), torch.tensor([made])))
        settings = {name: submitted.settings[name] for name in _OF_ENGINES if name in submitted.settings}
        settings |= {"response_length": submitted.limit - made, "seed": seed}
        request = self._requests.start(self.router.generate(trajectory.prompt + trajectory.tokens, settings))
        submitted.request = request
        request.add_done_callback(partial(self._request_ended, submitted))

    def _request_ended(self, submitted: Submitted, request: Future[Sampled]) -> None:
        """Settle a request, or let ``take`` do it (on the thread of the requests)."""
        if self.driven:
            self._arrived.put(submitted)
        elif not request.cancelled():
            self._settle_request(submitted, request)

    def _settle_request(self, submitted: Submitted, request: Future[Sampled]) -> list[Submitted]:
        """Append a response to its trajectory, and return that if it has ended; the rest is submitted again."""
        error = request.exception()
        with self._lock:
            if error is not None:
                self._live.pop(submitted, None)
                if submitted.set_running_or_notify_cancel():
                    submitted.set_exception(error)
                return []
            if submitted.done():
                return []
            submitted.reconnected = False
            self._append(submitted, request.result())
            if not submitted.end():
                self._send_request(submitted)
                return []
            return self._settled([submitted])

    def _append(self, submitted: Submitted, sampled: Sampled) -> None:
        trajectory, start = submitted.trajectory, 0
        if sampled.experts is not None:
            known = sum(map(len, trajectory.experts))
            trajectory.experts.append(sampled.experts[known:])
        for version, count in sampled.versions:
            part = slice(start, start + count)
            tokens, log_probs = array("q", sampled.tokens[part]), sampled.log_probs[part]
            trajectory.sampled(tokens, log_probs, version, submitted.temperature)
            start += count
        if sampled.basis is not None:
            self.log_probs, self._basis = LOG_PROBS[1], {LOG_PROBS[1]: dict(sampled.basis)}

    def _take_responses(self) -> list[Submitted]:
        """Return the trajectories that have ended since the last call; wait a moment for the first one.

        Raises:
            GroupError: no engine is left, for the cause that the group reports.
        """
        ended: list[Submitted] = []
        with contextlib.suppress(Empty):
            submitted = self._arrived.get(timeout=_TAKE_S)
            while True:
                request = submitted.request
                assert request is not None
                of_group = self._engines is None and not request.cancelled()
                lost = of_group and isinstance(request.exception(), NoEngineLeft)
                if lost and not submitted.reconnected:
                    submitted.reconnected = True
                    self._unsent.append(submitted)  # the group reports the cause, unless it knows none
                elif not request.cancelled():
                    ended += self._settle_request(submitted, request)
                submitted = self._arrived.get_nowait()
        if self._unsent and not ended:
            with self._lock:
                self.router = None
                self._send_requests(connect=True)
        return ended

    def drive_on_loop(self) -> None:
        """Make slices on the running event loop until no trajectory is in flight."""
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        try:
            await _let_waiters_run()
            while self.start():
                while not self.ready():
                    await asyncio.sleep(0.001)
                self.take()
                await _let_waiters_run()
        except Exception as error:
            with self._lock:
                waiting, self._live = self._live, {}
            for submitted in waiting:
                if submitted.set_running_or_notify_cancel():
                    submitted.set_exception(error)

    def _next_seed(self) -> int:
        if self._sampled_before is None:
            self._sampled_before = count_call(self.group, self.sampling)
        self.submissions += 1
        return seed_of(self.seed, "submit", self._sampled_before, self.submissions)

    def _check(self, trajectory: Trajectory, limit: int) -> None:
        length, most = len(trajectory.prompt), self.limits["prompt_length"]
        for tokens in (trajectory.prompt, trajectory.tokens):
            checked_token_ids("prompt", [min(tokens, default=0), max(tokens, default=0)], self.limits["vocab_size"])
        if not 1 <= length <= most:
            raise DataError(
                f"submit: the prompt has {length} tokens, expected 1 to rollout.prompt_length, which is {most}",
                length=length,
            )
        lengths = {name: len(getattr(trajectory, name)) for name in ("tokens", "mask", "log_probs", "versions")}
        if len({*lengths.values()}) > 1:
            raise DataError(f"submit: the trajectory has {lengths}; expected one of each for every token", **lengths)
        if len(trajectory.tokens) >= limit:
            raise DataError(
                f"submit: the response has {len(trajectory.tokens)} tokens already, and the most are {limit}: end it "
                "before there is no room for a turn, or raise rollout.response_length",
                length=len(trajectory.tokens),
            )

    def _call(self, rows: Sequence[Submitted]) -> DataProto:
        """Send a call that continues trajectories with the same settings."""
        going = [submitted.trajectory for submitted in rows]
        width = self.limits["prompt_length"] + self.limits["response_length"]
        room = min(self.slice_tokens, max(submitted.limit - len(submitted.trajectory.tokens) for submitted in rows))
        prompts = contexts(going, rows[0].settings, room, width)
        seeds = torch.tensor([trajectory.seed or 0 for trajectory in going], dtype=torch.long)
        generated = torch.tensor([len(trajectory.tokens) for trajectory in going])
        prompts = prompts.with_tensors({"sample_seed": seeds, "generated": generated})
        batch: DataProto = self.group.generate_sequences.options(blocking=False)(prompts)
        return batch


async def _let_waiters_run() -> None:
    """Let those who waited for a trajectory submit their next one: a result reaches them in three rounds."""
    for _ in range(3):
        await asyncio.sleep(0)


def contexts(going: Sequence[Trajectory], meta_info: Mapping[str, Any], room: int, width: int) -> DataProto:
    """Return prompts and responses so far as prompts that continue by ``room`` tokens, or fewer if one has no room.

    Args:
        going: responses that go on.
        meta_info: of ``generate_sequences``.
        room: [tokens] the most new ones of a row.
        width: [tokens] the most of a whole row.

    Returns:
        ``input_ids`` and ``attention_mask`` int64 ``[rows, tokens]``, padded on the left.
    """
    lengths = torch.tensor([len(trajectory.prompt) + len(trajectory.tokens) for trajectory in going])
    widest = int(lengths.max())
    pads = memoryview(array("q", (int(meta_info["pad_token_id"]),)) * widest)
    padded = (
        (pads[length:], trajectory.prompt, trajectory.tokens)
        for trajectory, length in zip(going, lengths.tolist(), strict=True)
    )
    ids = torch.frombuffer(bytearray().join(chain.from_iterable(padded)), dtype=torch.long).view(-1, widest)
    attention = (torch.arange(widest) >= widest - lengths[:, None]).long()
    meta_info = {**meta_info, "n": 1, "response_length": min(room, width - widest)}
    return DataProto.from_dict({"input_ids": ids, "attention_mask": attention}, meta_info=meta_info)


def append_sampled(
    trajectories: Sequence[Trajectory],
    turn: DataProto,
    limits: Sequence[int],
    temperatures: Sequence[float | None],
) -> None:
    """Append the tokens of a call to each response, as far as there is room.

    Args:
        trajectories: the responses, in the order of the rows.
        turn: the result of ``generate_sequences``.
        limits: [tokens] the most of each response.
        temperatures: of each response; None if it is not known.
    """
    responses, mask = columns(turn, "responses", "response_mask")
    width, kept, name = responses.shape[1], mask.sum(1).tolist(), log_probs_of(turn)
    scores = torch.zeros(responses.shape) if name is None else columns(turn, name)[0]
    tokens = array("q", responses.long().numpy().tobytes())
    log_probs = array("d", scores.double().numpy().tobytes())
    versions = turn.tensors().get("policy_version", torch.zeros(len(turn), dtype=torch.long)).tolist()
    experts, prompt_columns = turn.tensors().get(ROUTED_EXPERTS), columns(turn, "prompts")[0].shape[1]
    for row, (trajectory, limit, temperature) in enumerate(zip(trajectories, limits, temperatures, strict=True)):
        count = min(int(kept[row]), limit - len(trajectory.tokens))
        if experts is not None:
            known, before = sum(map(len, trajectory.experts)), len(trajectory.prompt) + len(trajectory.tokens)
            trajectory.experts.append(experts[row, prompt_columns - before + known : prompt_columns + count - 1])
        made = slice(row * width, row * width + count)
        trajectory.sampled(tokens[made], log_probs[made], versions[row], temperature)


def log_probs_of(turn: DataProto) -> str | None:
    """Return the name of the column with log-probabilities, if there is one."""
    return next((name for name in LOG_PROBS if name in turn.tensors()), None)


def trajectory_batch(
    trajectories: Sequence[Trajectory],
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
    log_probs: str | None = "rollout_log_probs",
) -> dict[str, Tensor]:
    """Return the columns of ``generate_sequences`` for whole responses, and two that show when they were made.

    Args:
        trajectories: the rows.
        prompt_length: [tokens] columns of the prompts.
        response_length: [tokens] columns of the responses.
        pad_token_id: fills the prompts on the left and the responses on the right.
        log_probs: the name of the column with log-probabilities; None: there is none.

    Returns:
        ``response_mask`` is 0 for the environment's tokens, which are in ``attention_mask``. ``truncated``, bool
        ``[rows]``: whether a response ended for lack of room or turns. ``policy_version`` int64 ``[rows]`` is that of
        a row's oldest token, or the newest of all if it has none; ``token_versions`` int64 ``[rows, response]`` that of
        each token, -1 for those not sampled. ``token_temperatures`` float32 ``[rows, response]`` is the temperature of
        each token, at which workers score it; it is left out if it is not known for all tokens.
    """
    rows = len(trajectories)
    ids = np.full((rows, prompt_length + response_length), pad_token_id)
    attended, positions = np.zeros(ids.shape, np.int64), np.zeros(ids.shape, np.int64)
    mask, versions = np.zeros((rows, response_length), np.int64), np.full((rows, response_length), -1)
    scores, counted = np.zeros((rows, response_length), np.float32), np.arange(ids.shape[1])
    temperatures = np.ones((rows, response_length), np.float32)
    for row, trajectory in enumerate(trajectories):
        length, start = len(trajectory.tokens), prompt_length - len(trajectory.prompt)
        end = prompt_length + length
        ids[row, start:prompt_length], ids[row, prompt_length:end] = trajectory.prompt, trajectory.tokens
        attended[row, start:end] = 1
        positions[row, start:end], positions[row, end:] = counted[: end - start], end - start - 1
        mask[row, :length] = trajectory.mask
        versions[row, :length] = trajectory.versions
        scores[row, :length] = trajectory.log_probs
        temperatures[row, : len(trajectory.temperatures)] = trajectory.temperatures
    oldest = versions.view(np.uint64).min(1).view(np.int64)  # without sign, -1 is the greatest
    oldest[oldest < 0] = versions.max(initial=0)
    # numpy asks for huge pages, so that writing to new memory is several times faster than in torch's
    parts = {
        "prompts": ids[:, :prompt_length].copy(),
        "responses": ids[:, prompt_length:].copy(),
        "response_mask": mask,
    }
    parts |= {"input_ids": ids, "attention_mask": attended, "position_ids": positions}
    whole = {name: torch.from_numpy(column) for name, column in parts.items()}
    whole["truncated"] = torch.tensor([trajectory.ended == "length" for trajectory in trajectories])
    whole |= {"policy_version": torch.from_numpy(oldest), "token_versions": torch.from_numpy(versions)}
    if all(len(trajectory.temperatures) == len(trajectory.tokens) for trajectory in trajectories):
        whole[TOKEN_TEMPERATURES] = torch.from_numpy(temperatures)
    if log_probs is not None:
        whole[log_probs] = torch.from_numpy(scores)
    if any(trajectory.experts for trajectory in trajectories):
        whole[ROUTED_EXPERTS] = _experts(trajectories, prompt_length, response_length)
    return whole


def _experts(trajectories: Sequence[Trajectory], prompt_length: int, response_length: int) -> Tensor:
    """Return the column ``routed_experts`` of whole responses; -1 for tokens that have none."""
    one = next(trajectory.experts[0] for trajectory in trajectories if trajectory.experts)
    column = one.new_full((len(trajectories), prompt_length + response_length, *one.shape[1:]), -1)
    for row, trajectory in enumerate(trajectories):
        start = prompt_length - len(trajectory.prompt)
        for part in trajectory.experts:
            column[row, start : start + len(part)] = part
            start += len(part)
    return column


def _token_ids(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)
