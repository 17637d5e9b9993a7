"""Episodes: async functions of a program that make a trajectory each, with turns of the policy and tools of their own.

An episode is ``async def episode(rollout, problem) -> Trajectory``. It runs in a process of its own, with others, or in
this process. What it returns is checked against what the engine made: it costs its trajectory if it raises, hangs, ends
its process, or returns tokens that the engine did not make.
"""

from __future__ import annotations

import copy
import logging
import math
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import Any, Protocol, runtime_checkable

import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, MControllerError
from trainer.columns import EPISODE_SCORES, FAILED, columns
from trainer.data.prompts import Demonstration
from trainer.data.tokenizers import TextTokenizer
from trainer.rewards.helper_process import HelperProcess
from trainer.rollout.episode_loop import SERVER, EpisodeLoop, load_episode, text_of
from trainer.rollout.made_tokens import FAILURE_KINDS, EpisodeError, EpisodeTurn, checked_trajectory
from trainer.rollout.seeds import TRAINING, count_call, seed_of
from trainer.rollout.trajectories import TrajectoryRollout, trajectory_batch
from trainer.rollout.trajectory import Trajectory
from workers.columns import HELD_OUT_BATCH
from workers.generate.request_settings import checked_sampling

logger = logging.getLogger(__name__)

PATIENCE_S = 0.05
"""[s] How long this process waits for its own episodes before the next step, if they wait for something else."""
GRACE_S = 2.0
"""[s] How long a process may take to answer that it has cancelled an episode, before it is killed."""
LISTENED_S = 1.0
"""[s] The most by which the time limits of episodes run down between two looks at the clock. While the controller does
something else, it neither reads what episodes have sent nor lets those in its own process go on."""
STALL_S = 10.0
"""[s] How long a message to or from a process may take, before it is killed."""


def outcome_columns(made: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Return the columns ``failed`` and ``episode_scores`` ``[rows]`` of the trajectories of episodes."""
    scores = [math.nan if trajectory.score is None else trajectory.score for trajectory in made]
    failed = [trajectory.ended in FAILURE_KINDS for trajectory in made]
    return {FAILED: torch.tensor(failed), EPISODE_SCORES: torch.tensor(scores, dtype=torch.float32)}


@runtime_checkable
class Demonstrating(Protocol):
    """The optional method of an episode's class that shows responses of several turns to the supervised phase."""

    def demonstrate(self, problem: Mapping[str, Any], tokenizer: TextTokenizer) -> Demonstration:
        """Return a right response to a problem, with what the policy is replied to in it.

        Args:
            problem: ``prompt``, ``answer`` and ``record`` of the problem.
            tokenizer: of the policy.
        """


@dataclass(eq=False)
class _Running:
    number: int
    problem: Mapping[str, Any]
    seed: int
    future: Future[Trajectory]
    turns: dict[int, EpisodeTurn] = field(default_factory=dict)
    alone: bool = False
    host: _Host | None = None
    deadline: float = 0.0
    prompts: int = 0

    @property
    def waits(self) -> bool:
        """Whether it waits for the policy."""
        return any(turn.is_awaited for turn in self.turns.values())


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
        self._loop.run(PATIENCE_S)
        messages = [pickle.loads(encoded) for encoded in self._out]
        self._out.clear()
        return messages

    def end(self) -> str:
        """Cancel the episodes."""
        self._loop.close()
        return "it was closed"


class _ProcessHost(_Host):
    """Runs episodes in another process."""

    def __init__(self, helper: HelperProcess) -> None:
        super().__init__()
        self._helper, self.connection = helper, helper.connection

    def send(self, message: tuple[Any, ...]) -> None:
        self.connection.send(message)

    def receive(self) -> list[tuple[Any, ...]]:
        messages = []
        while self.connection.poll():
            messages.append(self.connection.recv())
        return messages

    def end(self) -> str:
        return f"its process ended with exit code {self._helper.close()}"


class Episodes:
    """Runs episodes, whose turns a rollout generates: ``start`` them, and ``pump`` between two steps of its engines.

    An episode that fails has an ``EpisodeError`` as the exception of its future. If a process is lost, its episodes
    begin again, and get the turns that they had: those that did not wait for the rollout each alone in a process, where
    it is clear which of them fails.

    Args:
        episode: an import path such as ``my_module:episode``; without processes, also a function or class.
        options: its other keyword arguments.
        tokenizer: of the policy.
        processes: the number of processes; 0 runs the episodes in this one, in a fixed order, without protection from
            those that block.
        concurrency: the most episodes in flight; the others wait.
        timeout_s: [s] longest time that an episode may take between two turns of the policy.

    Attributes:
        function: the episode with its options.
        failed, restarted: numbers of episodes.
        replaced: the number of processes that were lost.
        begins: whether episodes that wait begin when others have ended.
        rollout: generates the turns.

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
        self.function = loaded
        self._loop = partial(EpisodeLoop, loaded, tokenizer)
        self._begin_empty()

    def _begin_empty(self) -> None:
        self._hosts: list[_Host] = [] if self.processes else [_Host(self._loop)]
        self.rollout: TrajectoryRollout | None = None
        self.failed = self.restarted = self.replaced = 0
        self._waiting: deque[_Running] = deque()
        self._running: dict[int, _Running] = {}
        self._made: SimpleQueue[tuple[_Running, int, EpisodeTurn]] = SimpleQueue()
        self._streams: dict[EpisodeTurn, tuple[_Running, int]] = {}
        self._started = 0
        self._now, self._read, self.begins = 0.0, time.monotonic(), True

    def another(self) -> Episodes:
        """Return one with the same settings, whose episodes run apart from these."""
        made = copy.copy(self)
        made._begin_empty()
        return made

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

    def start_processes(self) -> None:
        """Start the processes that are missing, all at the same time: each imports for seconds."""
        missing = self.processes - len(self._hosts)
        if missing <= 0:
            return
        with ThreadPoolExecutor(missing) as threads:
            starting = [threads.submit(self._process) for _ in range(missing)]
        self._hosts += [future.result() for future in starting if future.exception() is None]
        for future in starting:
            future.result()  # raises the error of a process that did not start

    def _process(self) -> _ProcessHost:
        first = self.episode, self.options, self.tokenizer
        return _ProcessHost(HelperProcess.start(SERVER, first, "the episode", "multi_turn.episode", STALL_S))

    @property
    def busy(self) -> bool:
        """Whether an episode does something else than wait for the policy."""
        return self._may_begin() or not all(running.waits for running in self._running.values())

    def _may_begin(self) -> bool:
        """Whether the first waiting episode may run now; one that lost its process has begun before."""
        return bool(self._waiting and len(self._running) < self.concurrency and (self.begins or self._waiting[0].turns))

    def start(self, problem: Mapping[str, Any], seed: int) -> Future[Trajectory]:
        """Start an episode, and return the future of its trajectory; ``cancel()`` stops it at the next ``pump``.

        Args:
            problem: the columns of a problem, and ``prompt_ids``, the token ids of its prompt.
            seed: of the random numbers of its responses, 64 bits, signed. Its first prompt has this one; others, and
                further branches of a response, get seeds that are mixed from it.

        Raises:
            ConfigError: ``connect`` was not called.
        """
        self._connected()
        self._started += 1
        running = _Running(self._started, problem, seed, Future())
        self._waiting.append(running)
        return running.future

    def tokens_of(self, future: Future[Trajectory]) -> int:
        """Return how many tokens the policy has made for an episode that has not ended."""
        unended = (*self._running.values(), *self._waiting)
        turns = [turn for running in unended if running.future is future for turn in running.turns.values()]
        return sum(len(turn.trajectory.tokens) - turn.before for turn in turns)

    def pump(self, seconds: float = 0.0) -> None:
        """Exchange messages with the episodes; wait up to ``seconds`` for one of another process."""
        cancelled = [running for running in self._running.values() if running.future.cancelled()]
        for running in cancelled:
            self._drop(running, stop=True)
        self._begin_waiting()
        while True:
            self._deliver()
            hosts = {host.connection: host for host in self._hosts if isinstance(host, _ProcessHost)}
            ready = [hosts[connection] for connection in wait(list(hosts), seconds)] if hosts else self._hosts  # type: ignore[index]
            for host in ready:
                self._receive(host)
            if not self._begin_waiting() and self._made.empty():
                break
            seconds = 0.0
        self._check_deadlines()

    def __call__(self, problems: DataProto, generate: Any) -> DataProto:
        """Return the responses to problems: a rollout function of ``RayPPOTrainer``.

        Args:
            problems: ``input_ids`` and ``attention_mask`` ``[rows, prompt]`` and other columns, which the episodes
                read; ``meta_info`` of ``generate_sequences``.
            generate: ``generate_sequences`` of a group.

        Returns:
            The columns of ``trajectory_batch``, and those of ``outcome_columns``: the rows of episodes that failed have
            no tokens, and get no score. ``meta_info["metrics"]`` has their number.
        """
        for left in (*self._running.values(), *self._waiting):  # by a call that failed
            left.future.cancel()
        trained = HELD_OUT_BATCH not in problems.meta_info
        rollout = TrajectoryRollout(generate.group, driven=True, trained=trained, **problems.meta_info)
        self.connect(rollout)
        ids, attention = columns(problems, "input_ids", "attention_mask")
        n = problems.meta_info.get("n", rollout.limits.get("n", 1))
        call = count_call(generate.group, problems.meta_info)
        started = []
        for row, (tokens, mask) in enumerate(zip(ids, attention.bool(), strict=True)):
            others = {name: column[row] for name, column in problems.non_tensor_batch.items()}
            problem = {**others, "prompt_ids": tokens[mask].tolist()}
            seeds = [seed_of(rollout.seed, TRAINING, call, row, sample) for sample in range(n)]
            started += [(problem, self.start(problem, seed)) for seed in seeds]
        self.run()
        made = [
            future.result() if error is None else Trajectory(problem["prompt_ids"], ended=error.kind)  # type: ignore[attr-defined]
            for problem, future in started
            for error in (future.exception(),)
        ]
        whole = trajectory_batch(
            made,
            prompt_length=ids.shape[1],
            response_length=rollout.limits["response_length"],
            pad_token_id=problems.meta_info["pad_token_id"],
            log_probs=rollout.log_probs,
        )
        whole |= outcome_columns(made)
        return DataProto.from_dict(whole, meta_info={**rollout.meta_info(n), "metrics": self.take_metrics(made)})

    def run(self) -> None:
        """Let the engines go on until every episode has ended."""
        rollout = self._connected()
        while len(self):
            self.pump(0.0)
            if rollout.start():
                while not rollout.ready():
                    self.pump(0.001)
                rollout.take()
            elif len(self) and self._made.empty():
                self.pump(0.01)

    def take_metrics(self, made: Sequence[Trajectory]) -> dict[str, float]:
        """Return how many of the trajectories failed, and why, their numbers of turns, and means of their metrics.

        ``episodes/restarted`` counts the episodes that have begun again since the last call, and
        ``episodes/replaced_processes`` the processes that were lost.
        """
        restarted, self.restarted = self.restarted, 0
        replaced, self.replaced = self.replaced, 0
        kinds, turns = Counter(trajectory.ended for trajectory in made), [trajectory.turns for trajectory in made]
        replies = sum(len(trajectory.mask) - sum(trajectory.mask) for trajectory in made)
        values: dict[str, list[float]] = {}
        for trajectory in made:
            for name, value in trajectory.metrics.items():
                values.setdefault(f"environment/{name}", []).append(value)
        counts = {kind: kinds[kind] for kind in FAILURE_KINDS}
        counts |= {"failed": sum(counts.values()), "restarted": restarted, "replaced_processes": replaced}
        return {f"episodes/{name}": float(count) for name, count in counts.items()} | {
            "multi_turn/turns_mean": sum(turns) / len(turns),
            "multi_turn/turns_max": float(max(turns)),
            "multi_turn/reply_tokens_mean": replies / len(turns),
            **{name: sum(numbers) / len(numbers) for name, numbers in values.items()},
        }

    def close(self) -> None:
        """End the processes and drop all episodes."""
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            host.end()
        for running in [*self._running.values(), *self._waiting]:
            running.future.cancel()
        self._running.clear()
        self._waiting.clear()

    def _begin_waiting(self) -> bool:
        """Start the episodes that wait, as far as they may run, and return whether one was started."""
        before = len(self._running)
        while self._may_begin():
            if self._waiting[0].future.cancelled():
                self._cancel_turns(self._waiting.popleft())
            elif not self._begin(self._waiting[0]):
                break
        return len(self._running) > before

    def _begin(self, running: _Running) -> bool:
        """Start the first waiting episode, if there is a host for it."""
        self.start_processes()
        free = [host for host in self._hosts if not any(running.alone for running in host.running.values())]
        if not free or (running.alone and all(host.running for host in free)):
            return False
        running.host = host = min(free, key=lambda host: len(host.running))
        self._waiting.popleft()
        running.prompts = 0
        running.deadline = self._clock() + self.timeout_s
        self._running[running.number] = host.running[running.number] = running
        longest = self._connected().limits["response_length"]
        self._send(host, ("start", running.number, running.problem, running.seed, longest))
        return True

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
                if host in self._hosts:  # an answer to one before may have found that its process is lost
                    self._handle(host, message)

    def _lose(self, host: _Host, error: EpisodeError | None = None) -> None:
        self._hosts.remove(host)
        self.replaced += 1
        reason = host.end()
        for running in list(host.running.values()):
            failed, running.alone = running.alone, not running.waits
            if failed:
                self._drop(running)
                self._fail(running, error or EpisodeError(reason, kind="died"))
                continue
            del self._running[running.number]
            for turn in running.turns.values():
                turn.is_awaited = False
            self.restarted += 1
            self._waiting.appendleft(running)

    def _handle(self, host: _Host, message: tuple[Any, ...]) -> None:
        kind, number, content = message
        running = host.running.get(number)
        if kind == "stopped":
            host.kill_at = float("inf")
        if running is None:
            return
        try:
            self._act(host, running, kind, pickle.loads(content))
        except (Exception, SystemExit) as error:  # an episode can send anything
            text = f"its message {kind[:20]!r} raised {text_of(error)}"
            failure = error if isinstance(error, EpisodeError) else EpisodeError(text, kind="invalid")
            if running.number in self._running:
                self._drop(running, stop=kind in ("submit", "cancel"))
            self._fail(running, failure)

    def _act(self, host: _Host, running: _Running, kind: str, values: tuple[Any, ...]) -> None:
        """Act on a message of an episode.

        Raises:
            EpisodeError: the episode has failed.
        """
        if kind == "submit":
            self._submit(host, running, *values)
        elif kind == "cancel":
            turn = running.turns.get(values[0])
            if turn is not None:
                if turn.submitted is not None:
                    turn.submitted.cancel()
                turn.submitted, turn.is_awaited = None, False
                if turn.sent == turn.before:  # otherwise the episode may return what it has of it
                    del running.turns[values[0]]
        elif kind == "end":
            made = checked_trajectory(running.turns.values(), values[0], self._connected().limits)
            if not any(made.mask):
                raise EpisodeError("its response has no token of the policy", kind="invalid")
            made.ended = made.ended if made.ended in ("stop", "length") else "environment"
            self._drop(running)
            if running.future.set_running_or_notify_cancel():
                running.future.set_result(made)
        elif kind == "stopped":
            raise self._too_late()
        else:
            raise EpisodeError(str(values[0]), kind="raised")

    def _submit(
        self, host: _Host, running: _Running, request: int, trajectory: Trajectory, options: dict[str, Any]
    ) -> None:
        rollout = self._connected()
        turn = self._turn(running, request, checked_trajectory(running.turns.values(), trajectory, rollout.limits))
        known = running.turns.get(request)
        if known is not None and known.context() == turn.context():
            turn = known
        elif known is not None and known.submitted is not None:  # the episode began again, and asks otherwise
            known.submitted.cancel()
        running.turns[request], turn.is_awaited, turn.sent = turn, True, turn.before
        if options.get("stream"):
            self._streams[turn] = running, request
        if turn.trajectory.ended and turn is known:
            self._made.put((running, request, turn))
        elif turn.submitted is None:
            try:
                seed = checked_sampling({"seed": options.pop("seed", None)}).get("seed")
                if seed is not None:  # an agent may ask for the same one in all samples of a problem
                    turn.trajectory.seed = seed_of(running.seed, "request", seed)
                turn.submitted = rollout.submit(turn.trajectory, seed=turn.trajectory.seed, **options)
            except MControllerError as error:
                del running.turns[request]
                self._send(host, ("failed", running.number, request, error))
                return
            turn.submitted.add_done_callback(lambda done: self._made.put((running, request, turn)))

    @staticmethod
    def _turn(running: _Running, request: int, trajectory: Trajectory) -> EpisodeTurn:
        """Return the turn of a request, with a seed that no other prompt or branch of the episode has."""
        turn = EpisodeTurn(trajectory, len(trajectory.tokens))
        if not any(trajectory.mask):
            trajectory.seed = running.seed
            if running.prompts:
                trajectory.seed = seed_of(running.seed, "prompt", running.prompts)
            running.prompts += 1
            return turn
        context = turn.context()
        if any(number < request and other.context() == context for number, other in running.turns.items()):
            trajectory.seed = seed_of(running.seed, "branch", request)
        return turn

    def _deliver(self) -> None:
        """Send the turns that were made to their episodes, and the tokens of those that stream."""
        for streaming, (running, request) in list(self._streams.items()):
            if not streaming.is_awaited or running.host is None:
                del self._streams[streaming]
            elif len(streaming.trajectory.tokens) > streaming.sent and not streaming.trajectory.ended:
                self._send(running.host, ("part", running.number, request, streaming.take_unsent()))
        while True:
            try:
                running, request, turn = self._made.get_nowait()
            except Empty:
                return
            host, is_current = running.host, running.turns.get(request) is turn
            if host is None or not is_current or not turn.is_awaited or (turn.submitted and turn.submitted.cancelled()):
                continue
            submitted, turn.submitted, turn.is_awaited = turn.submitted, None, False
            running.deadline = self._clock() + self.timeout_s
            if submitted is not None and (error := submitted.exception()) is not None:
                if not isinstance(error, MControllerError):  # of an engine's library: it may have no pickle
                    error = MControllerError(text_of(error))
                self._send(host, ("failed", running.number, request, error))
                continue
            self._send(host, ("made", running.number, request, turn.take_unsent()))

    def _clock(self) -> float:
        """Return the seconds that the controller has listened, by which time limits run down."""
        before, self._read = self._read, time.monotonic()
        self._now += min(self._read - before, LISTENED_S)
        return self._now

    def _check_deadlines(self) -> None:
        """Stop the episodes that take too long; a process that does not answer is blocked by one of its episodes."""
        now = self._clock()
        late = [running for running in self._running.values() if running.deadline < now and not running.waits]
        for running in late:
            running.deadline = float("inf")
            assert running.host is not None
            running.host.kill_at = min(running.host.kill_at, now + GRACE_S)
            self._send(running.host, ("stop", running.number))
        for host in [host for host in self._hosts if host.kill_at < now]:
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
        self._cancel_turns(running)
        running.host = None
        if stop and host in self._hosts:
            self._send(host, ("stop", running.number))

    def _cancel_turns(self, running: _Running) -> None:
        for turn in running.turns.values():
            if turn.submitted is not None:
                turn.submitted.cancel()
        running.turns = {}

    def _fail(self, running: _Running, error: EpisodeError) -> None:
        self.failed += 1
        if self.failed <= 3:
            logger.warning("episode %d failed: %s", running.number, error)
        if running.future.set_running_or_notify_cancel():
            running.future.set_exception(error)
