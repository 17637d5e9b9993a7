"""Episodes: async functions of a program that make a trajectory each, with turns of the policy and tools of their own.

An episode is ``async def episode(rollout, problem) -> Trajectory``. It runs in a process of its own, with others, or in
this process. What it returns is checked against what the engine made: it costs its trajectory if it raises, hangs, ends
its process, or returns tokens that the engine did not make.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue
from subprocess import Popen
from typing import Any, NamedTuple

import torch

from mcontroller.data.protocol import DataProto
from mcontroller.errors import ConfigError, MControllerError
from mcontroller.ppo.agents.episode_loop import SERVER, EpisodeLoop, load_episode
from mcontroller.ppo.agents.trajectories import Submitted, Trajectory, TrajectoryRollout, seed_of, trajectory_batch
from mcontroller.ppo.agents.turns import turn_metrics
from mcontroller.ppo.config import MultiTurnConfig
from mcontroller.ppo.data import FAILED, columns
from mcontroller.ppo.rewards.processes import kill_process, spawn_process

logger = logging.getLogger(__name__)

PATIENCE_S = 0.05
"""[s] How long this process waits for its own episodes before the next slice, if they wait for something else."""
EAGER_ROUNDS = 100
"""How many rounds of the event loop it makes before it lets some time pass between them."""
GRACE_S = 2.0
"""[s] How long a process may take to answer that it has cancelled an episode, before it is killed."""
STALL_S = 10.0
"""[s] How long a message to or from a process may take, before it is killed."""


_GONE: Future[Trajectory] = Future()


class EpisodeError(MControllerError):
    """An episode made no trajectory.

    Attributes:
        kind: ``raised``, ``timed_out``, ``died``, or ``invalid``: what it returned cannot be trained on.
    """

    kind: str


class MadeTokens:
    """What the engine made for one episode, by the tokens before it."""

    class Span(NamedTuple):
        """The tokens of one turn, and the response up to them."""

        tokens: list[int]
        after: Trajectory

    def __init__(self) -> None:
        self._spans: dict[tuple[int, ...], list[MadeTokens.Span]] = {}

    def add(self, trajectory: Trajectory, before: int) -> None:
        """Record the tokens of a response from position ``before`` on."""
        key = tuple(trajectory.prompt + trajectory.tokens[:before])
        self._spans.setdefault(key, []).append(MadeTokens.Span(trajectory.tokens[before:], trajectory))

    def checked(self, found: Any, limit: int) -> Trajectory:
        """Return the trajectory with log-probabilities, versions and experts of the engine.

        Args:
            found: what an episode returned or submitted. It may leave out the last tokens of a turn.
            limit: [tokens] the longest response.

        Raises:
            EpisodeError: it is no trajectory, it is too long, or the engine did not make a token that is marked as
                the policy's.
        """
        if not isinstance(found, Trajectory):
            raise EpisodeError(f"it returned {found}; expected a Trajectory", kind="invalid")
        tokens, length = found.tokens, len(found.tokens)
        if length > limit or len(found.own) != length:
            raise EpisodeError(
                f"its response has {length} tokens and {len(found.own)} marks in own; expected equally many, and at "
                f"most {limit}, which is rollout.response_length",
                kind="invalid",
            )
        checked = replace(found, log_probs=[0.0] * length, versions=[-1] * length, experts=[])
        position = 0
        while position < length:
            if not found.own[position]:
                position += 1
                continue
            until = next((each for each in range(position, length) if not found.own[each]), length)
            for span in self._spans.get(tuple(found.prompt + tokens[:position]), ()):
                stop = min(until, position + len(span.tokens))
                if tokens[position:stop] == span.tokens[: stop - position]:
                    break
            else:
                raise EpisodeError(
                    f"token {position} of its response is marked as the policy's, and the engine did not make it "
                    "after the tokens before it: return the Trajectory of rollout.submit, and add the tokens of an "
                    "environment with replied()",
                    kind="invalid",
                )
            checked.log_probs[position:stop] = span.after.log_probs[position:stop]
            checked.versions[position:stop] = span.after.versions[position:stop]
            checked.seed, checked.experts = span.after.seed, span.after.experts_before(stop)
            position = stop
        return checked


@dataclass(eq=False)
class _Running:
    number: int
    problem: Mapping[str, Any]
    seed: int
    future: Future[Trajectory]
    alone: bool = False
    host: _Host | None = None
    deadline: float = 0.0
    prompts: int = 0
    made: MadeTokens = field(default_factory=MadeTokens)
    waiting: dict[int, Submitted] = field(default_factory=dict)


class _Host:
    """Runs episodes in this process."""

    def __init__(self, episodes: Callable[[Callable[[Any], None]], EpisodeLoop] | None = None) -> None:
        self.running: dict[int, _Running] = {}
        self.kill_at = float("inf")
        self._out: deque[bytes] = deque()
        if episodes is not None:
            self._loop = episodes(lambda message: self._out.append(pickle.dumps(message)))

    def send(self, message: tuple[Any, ...]) -> None:
        self._loop.handle(pickle.loads(pickle.dumps(message)))

    def receive(self) -> list[tuple[Any, ...]]:
        """Return the messages that have arrived; first let the episodes run until all of them wait for the rollout."""
        until, loop = time.monotonic() + PATIENCE_S, self._loop.loop
        for rounds in count():
            loop.call_later(0.0 if rounds < EAGER_ROUNDS else 0.001, loop.stop)
            loop.run_forever()
            if self._loop.all_wait() or time.monotonic() > until:
                break
        messages = [pickle.loads(each) for each in self._out]
        self._out.clear()
        return messages

    def end(self) -> str:
        """Cancel the episodes."""
        self._loop.loop.close()
        return "it was closed"


class _ProcessHost(_Host):
    """Runs episodes in another process. A message that it neither reads nor completes raises OSError after a while."""

    def __init__(self, process: Popen[bytes], connection: Connection) -> None:
        super().__init__()
        self.process, self.connection = process, connection
        with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as ours:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(STALL_S), 0))

    def send(self, message: tuple[Any, ...]) -> None:
        self.connection.send(message)

    def receive(self) -> list[tuple[Any, ...]]:
        messages = []
        while self.connection.poll():
            messages.append(self.connection.recv())
        return messages

    def end(self) -> str:
        atexit.unregister(self.end)
        code = kill_process(self.process)
        self.connection.close()
        return f"its process ended with exit code {code}"


class Episodes:
    """Runs episodes, whose turns a rollout generates: ``start`` them, and ``pump`` between two slices.

    An episode that fails has an ``EpisodeError`` as the exception of its future. If a process is lost, its episodes
    begin again with the same seeds: those that did not wait for the rollout each alone in a process, where it is clear
    which of them fails.

    Args:
        episode: an import path such as ``my_module:episode``; without processes, also a function or class.
        options: its other keyword arguments.
        tokenizer: of the policy.
        processes: the number of processes; 0 runs the episodes in this one, in a fixed order, without protection from
            those that block.
        concurrency: the most episodes in flight; the others wait.
        timeout_s: [s] longest time that an episode may take between two turns of the policy.

    Raises:
        ConfigError: the function cannot be imported or is not async; a function without an import path has processes.
    """

    def __init__(
        self,
        episode: str | Callable[..., Any],
        options: Mapping[str, Any] | None = None,
        *,
        tokenizer: Any = None,
        processes: int = 1,
        concurrency: int = 256,
        timeout_s: float = 60.0,
    ) -> None:
        self.episode, self.options, self.tokenizer = episode, dict(options or {}), tokenizer
        self.processes, self.concurrency, self.timeout_s = processes, concurrency, timeout_s
        loaded = load_episode(episode, self.options)
        if processes and not isinstance(episode, str):
            raise ConfigError(
                f"the episode {episode!r} is to run in {processes} processes, which import it: pass its import path, "
                "such as 'my_module:episode', or processes=0",
                key="multi_turn.episode",
            )
        self._hosts: list[_Host] = []
        if not processes:
            self._hosts = [_Host(partial(EpisodeLoop, loaded, tokenizer))]
        self.rollout: TrajectoryRollout | None = None
        self.counts: Counter[str] = Counter()
        self._waiting: deque[_Running] = deque()
        self._running: dict[int, _Running] = {}
        self._made: SimpleQueue[tuple[_Running, int, Submitted, int]] = SimpleQueue()
        self._started = 0

    def __len__(self) -> int:
        """The number of episodes that have not ended."""
        return len(self._waiting) + len(self._running)

    def connect(self, rollout: TrajectoryRollout) -> None:
        """Generate turns with this rollout from now on."""
        self.rollout = rollout

    def _connected(self) -> TrajectoryRollout:
        if self.rollout is None:
            raise ConfigError("the episodes have no rollout yet: call connect(rollout) first", key="rollout")
        return self.rollout

    def start(self, problem: Mapping[str, Any], seed: int) -> Future[Trajectory]:
        """Start an episode, and return the future of its trajectory; ``cancel()`` stops it at the next ``pump``.

        Args:
            problem: the columns of a problem, and ``prompt_ids``, the token ids of its prompt.
            seed: of the random numbers of its responses, 64 bits, signed.

        Raises:
            ConfigError: ``connect`` was not called.
        """
        self._connected()
        self._started += 1
        running = _Running(self._started, problem, seed, Future())
        self._waiting.append(running)
        return running.future

    def pump(self, seconds: float = 0.0) -> None:
        """Exchange messages with the episodes; wait up to ``seconds`` for one of another process."""
        for running in [each for each in self._running.values() if each.future.cancelled()]:
            self._drop(running, stop=True)
        while self._waiting and len(self._running) < self.concurrency:
            if self._waiting[0].future.cancelled():
                self._waiting.popleft()
            elif not self._begin(self._waiting[0]):
                break
        self._deliver()
        connections = {each.connection: each for each in self._hosts if isinstance(each, _ProcessHost)}
        ready = [connections[each] for each in wait(list(connections), seconds)] if connections else self._hosts  # type: ignore[index]
        for host in ready:
            self._receive(host)
        self._check_deadlines()

    def __call__(self, problems: DataProto, generate: Any) -> DataProto:
        """Return the responses to problems: a rollout function of ``RayPPOTrainer``.

        Args:
            problems: ``input_ids`` and ``attention_mask`` ``[rows, prompt]`` and other columns, which the episodes
                read; ``meta_info`` of ``generate_sequences``.
            generate: ``generate_sequences`` of a group.

        Returns:
            The columns of ``trajectory_batch``, and ``failed``, bool ``[rows]``: the rows of episodes that failed have
            no tokens, and get no score. ``meta_info["metrics"]`` has their number.
        """
        if self.rollout is None or self.rollout.group is not generate.group:
            self.connect(TrajectoryRollout(generate.group, driven=True))
        rollout = self._connected()
        rollout.sampling = dict(problems.meta_info)
        ids, attention = columns(problems, "input_ids", "attention_mask")
        n, call = problems.meta_info.get("n", rollout.limits.get("n", 1)), self._calls(generate.group, problems)
        started = []
        for row, (tokens, mask) in enumerate(zip(ids, attention.bool(), strict=True)):
            others = {name: column[row] for name, column in problems.non_tensor_batch.items()}
            problem = {**others, "prompt_ids": tokens[mask].tolist()}
            started += [(problem, self.start(problem, seed_of(call, row, sample))) for sample in range(n)]
        self.run()
        made = [
            Trajectory(problem["prompt_ids"]) if future.exception() else future.result() for problem, future in started
        ]
        whole = trajectory_batch(
            made,
            prompt_length=max(ids.shape[1], *(len(each.prompt) for each in made)),
            response_length=rollout.limits["response_length"],
            pad_token_id=problems.meta_info["pad_token_id"],
        )
        failed = torch.tensor([future.exception() is not None for _, future in started])
        metrics = {**turn_metrics(made), **self.take_metrics()}
        return DataProto.from_dict(
            {**whole, FAILED: failed}, meta_info={**problems.meta_info, "n": n, "metrics": metrics}
        )

    @staticmethod
    def _calls(group: Any, problems: DataProto) -> int:
        """Return how many batches the group has sampled before, and count this one: a checkpoint has the number."""
        calls: int = group.sampling_state()[0]["sampled_batches"]
        if problems.meta_info.get("do_sample", True):
            group.restore_sampling({"sampled_batches": calls + 1})
        return calls

    def run(self) -> None:
        """Make slices until every episode has ended."""
        rollout = self._connected()
        while len(self):
            self.pump(0.0)
            if rollout.start():
                while not rollout.ready():
                    self.pump(0.001)
                rollout.take()
            elif len(self) and self._made.empty():
                self.pump(0.01)

    def take_metrics(self) -> dict[str, float]:
        """Return how many episodes failed since the last call, and why."""
        counts, self.counts = self.counts, Counter()
        names = ("failed", "raised", "timed_out", "died", "invalid", "restarted")
        return {f"episodes/{name}": float(counts[name]) for name in names}

    def close(self) -> None:
        """End the processes and drop all episodes."""
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            host.end()
        for running in [*self._running.values(), *self._waiting]:
            running.future.cancel()
        self._running.clear()
        self._waiting.clear()

    def _begin(self, running: _Running) -> bool:
        """Start the first waiting episode, if there is a host for it."""
        if len(self._hosts) < self.processes:
            self._hosts.append(self._process())
            atexit.register(self._hosts[-1].end)
        free = [host for host in self._hosts if not any(each.alone for each in host.running.values())]
        if not free or (running.alone and all(host.running for host in free)):
            return False
        running.host = host = min(free, key=lambda each: len(each.running))
        self._waiting.popleft()
        running.made, running.waiting, running.prompts = MadeTokens(), {}, 0
        running.deadline = time.monotonic() + self.timeout_s
        self._running[running.number] = host.running[running.number] = running
        longest = self._connected().limits["response_length"]
        self._send(host, ("start", running.number, running.problem, running.seed, longest))
        return True

    def _process(self) -> _ProcessHost:
        first = self.episode, self.options, self.tokenizer
        return _ProcessHost(*spawn_process(SERVER, first, "the episode", "multi_turn.episode"))

    def _send(self, host: _Host, message: tuple[Any, ...]) -> None:
        try:
            host.send(message)
        except OSError:
            self._lose(host)

    def _receive(self, host: _Host) -> None:
        try:
            messages = host.receive()
        except (EOFError, OSError):
            self._lose(host)
        else:
            for message in messages:
                self._handle(host, message)

    def _lose(self, host: _Host, error: EpisodeError | None = None) -> None:
        self._hosts.remove(host)
        reason = host.end()
        for running in list(host.running.values()):
            failed, running.alone = running.alone, not running.waiting
            self._drop(running)
            if failed:
                self._fail(running, error or EpisodeError(reason, kind="died"))
            else:
                self.counts["restarted"] += 1
                self._waiting.appendleft(running)

    def _handle(self, host: _Host, message: tuple[Any, ...]) -> None:
        kind, number, *values = message
        running = host.running.get(number)
        if kind == "stopped":
            host.kill_at = float("inf")
        if running is None:
            return
        try:
            if kind == "stopped":
                raise self._too_late()
            if kind == "submit":
                self._submit(running, *values)
            elif kind == "cancel":
                running.waiting.pop(values[0], _GONE).cancel()
            elif kind == "raised":
                raise EpisodeError(values[0], kind="raised")
            elif kind == "end":
                made = running.made.checked(values[0], self._connected().limits["response_length"])
                if not any(made.own):
                    raise EpisodeError("its response has no token of the policy", kind="invalid")
                made.ended = made.ended if made.ended in ("stop", "length") else "environment"
                self._drop(running)
                if running.future.set_running_or_notify_cancel():
                    running.future.set_result(made)
        except EpisodeError as error:
            self._drop(running)
            self._fail(running, error)

    def _submit(self, running: _Running, request: int, trajectory: Trajectory, options: dict[str, Any]) -> None:
        rollout = self._connected()
        try:
            trajectory = running.made.checked(trajectory, rollout.limits["response_length"])
            if not any(trajectory.own):
                trajectory.seed = running.seed if running.prompts == 0 else seed_of(running.seed, running.prompts)
                running.prompts += 1
            before = len(trajectory.tokens)
            submitted = rollout.submit(trajectory, **options)
        except EpisodeError:
            raise
        except MControllerError as error:
            assert running.host is not None
            running.host.send(("failed", request, error))
            return
        running.waiting[request] = submitted
        submitted.add_done_callback(lambda done: self._made.put((running, request, submitted, before)))

    def _deliver(self) -> None:
        """Send the turns that were made to their episodes."""
        while True:
            try:
                running, request, submitted, before = self._made.get_nowait()
            except Empty:
                return
            host = running.host
            if running.waiting.get(request) is not submitted or host is None:
                continue
            del running.waiting[request]
            running.deadline = time.monotonic() + self.timeout_s
            if (error := submitted.exception()) is not None:
                self._send(host, ("failed", request, error))
                continue
            made = submitted.trajectory
            running.made.add(made, before)
            added = {name: getattr(made, name)[before:] for name in ("tokens", "log_probs", "versions")}
            self._send(host, ("made", request, (added, made.ended)))

    def _check_deadlines(self) -> None:
        """Stop the episodes that take too long; a process that does not answer is blocked by one of its episodes."""
        now = time.monotonic()
        for running in [each for each in self._running.values() if not each.waiting and each.deadline < now]:
            running.deadline = float("inf")
            assert running.host is not None
            running.host.kill_at = min(running.host.kill_at, now + GRACE_S)
            self._send(running.host, ("stop", running.number))
        for host in [each for each in self._hosts if each.kill_at < now]:
            self._lose(host, self._too_late())

    def _too_late(self) -> EpisodeError:
        text = f"it did not ask for a turn or return within {self.timeout_s:g} s"
        return EpisodeError(text, kind="timed_out")

    def _drop(self, running: _Running, *, stop: bool = False) -> None:
        """Forget an episode; its turns in flight are cancelled."""
        host = running.host
        del self._running[running.number]
        if host is not None:
            del host.running[running.number]
        for submitted in running.waiting.values():
            submitted.cancel()
        running.waiting, running.host = {}, None
        if stop and host in self._hosts:
            self._send(host, ("stop", running.number))

    def _fail(self, running: _Running, error: EpisodeError) -> None:
        self.counts["failed"] += 1
        self.counts[error.kind] += 1
        if self.counts["failed"] <= 3:
            logger.warning("episode %d failed: %s", running.number, error)
        if running.future.set_running_or_notify_cancel():
            running.future.set_exception(error)


def make_episodes(config: MultiTurnConfig, tokenizer: Any) -> Episodes | None:
    """Return the episodes of a configuration, if it names a function.

    Raises:
        ConfigError: the function cannot be imported, is not async, or does not take the options.
    """
    if config.episode is None:
        return None
    limits = {"processes": config.processes, "concurrency": config.concurrency, "timeout_s": config.timeout_s}
    return Episodes(config.episode, config.options, tokenizer=tokenizer, **limits)  # type: ignore[arg-type]
