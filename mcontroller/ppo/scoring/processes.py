"""Processes that call reward functions: tasks with deadlines, and new processes for those that hang or die."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from typing import TypeAlias

from mcontroller.errors import ConfigError
from mcontroller.ppo.scoring.config import RewardFunctionConfig
from mcontroller.ppo.scoring.server import Sample, ScoreOutcome

__all__ = ["ScoringProcesses", "Task"]

SERVER = "import sys; from mcontroller.ppo.scoring.server import serve_descriptor; serve_descriptor(int(sys.argv[1]))"
START_TIMEOUT_S = 300.0
"""Longest time in which a process starts and imports the functions."""
EXIT_TIMEOUT_S = 1.0
"""Longest time from the end of a process's connection to its exit code."""


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


@dataclass(eq=False)
class _Server:
    process: subprocess.Popen[bytes]
    connection: Connection


@dataclass(eq=False)
class _Running:
    server: _Server
    task: Task
    exchange: threading.Thread
    deadline: float
    returned: int = 0


_Arrived: TypeAlias = "SimpleQueue[tuple[_Server, list[ScoreOutcome]]]"


class ScoringProcesses:
    """Processes on this machine, which start when they are needed.

    Args:
        functions: the reward functions, by name.
        processes: the number of processes.
        timeout_s: [s] deadline of a task.
    """

    def __init__(self, functions: Mapping[str, RewardFunctionConfig], processes: int, timeout_s: float) -> None:
        self.functions = dict(functions)
        self.processes = processes
        self.timeout_s = timeout_s
        self._idle: list[_Server] = []
        self._servers: list[_Server] = []
        self._closed = False

    def run(self, tasks: Sequence[Task]) -> dict[str, dict[int, ScoreOutcome]]:
        """Return the outcomes of the samples of every task, by the name of the function and the index of the sample.

        A process that does not return in time is killed, and the next task starts another one.

        Raises:
            ConfigError: a process cannot import a function, or ``close`` was called.
        """
        results: dict[str, dict[int, ScoreOutcome]] = {task.name: {} for task in tasks}
        pending = deque(tasks)
        running: dict[_Server, _Running] = {}
        arrived: _Arrived = SimpleQueue()
        while pending or running:
            while pending and len(running) < self.processes:
                each = self._send(pending.popleft(), arrived)
                running[each.server] = each
            for each, outcomes, lost in self._next_events(running, arrived):
                task = each.task
                results[task.name].update(zip(task.indices[each.returned :], outcomes, strict=False))
                each.returned += len(outcomes)
                each.deadline = self._deadline(task)
                left = list(zip(task.samples, task.indices, strict=True))[each.returned :]
                if lost and task.divisible and len(task.samples) > 1:
                    pending.extendleft(replace(task, samples=[sample], indices=[row]) for sample, row in left[::-1])
                elif lost:
                    results[task.name].update((row, ScoreOutcome(error=lost)) for _, row in left)
                if lost or not left:
                    del running[each.server]
                if not left and not lost:
                    each.exchange.join()
                    self._idle.append(each.server)
        return results

    def close(self) -> None:
        """End every process. A call of ``run`` in another thread ends."""
        self._closed = True
        for server in list(self._servers):
            _kill(server)

    def _deadline(self, task: Task) -> float:
        return time.monotonic() + self.timeout_s + task.margin_s

    def _send(self, task: Task, arrived: _Arrived) -> _Running:
        """Start a task on an idle process that lives, or on a new one."""
        server = self._idle.pop() if self._idle else self._start()
        while server.process.poll() is not None:
            self._end(server)
            server = self._idle.pop() if self._idle else self._start()
        message = ForkingPickler.dumps((task.name, task.samples))
        arguments = (server, message, len(task.samples), arrived)
        exchange = threading.Thread(target=_exchange, args=arguments, name="reward process", daemon=True)
        exchange.start()
        return _Running(server, task, exchange, self._deadline(task))

    def _next_events(
        self, running: Mapping[_Server, _Running], arrived: _Arrived
    ) -> Iterator[tuple[_Running, list[ScoreOutcome], str]]:
        """Wait for outcomes or a deadline; yield tasks, their outcomes, and why their processes were lost, if so."""
        timeout = max(0.0, min(each.deadline for each in running.values()) - time.monotonic())
        with contextlib.suppress(Empty):
            while True:
                server, outcomes = arrived.get(timeout=timeout)
                timeout = 0.0
                if server in running:  # else it was late, and has been ended
                    yield running[server], outcomes, "" if outcomes else self._ended(running[server])
        for each in [each for each in running.values() if time.monotonic() >= each.deadline]:
            self._end(each.server, each)
            yield each, [], f"it did not return within {self.timeout_s:g} s"

    def _ended(self, running: _Running) -> str:
        """Return how a process ended that has closed its connection; its exit code is known a moment later."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.server.process.wait(EXIT_TIMEOUT_S)
        return f"its process ended with exit code {self._end(running.server, running)}"

    def _start(self) -> _Server:
        """Start a process that imports the functions. It does not import the main module of this program.

        It is in a session of its own: Ctrl-C in the terminal ends the program, which ends its processes.
        """
        if self._closed:
            raise ConfigError("the processes of the reward functions were closed", key="rewards.functions")
        ours, theirs = Pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,
        )
        theirs.close()
        server = _Server(process, ours)
        self._servers.append(server)
        ours.send((self.functions, self.timeout_s))
        if not ours.poll(START_TIMEOUT_S):
            self._end(server)
            raise ConfigError(
                f"a process did not import the reward functions within {START_TIMEOUT_S:g} s", key="rewards.functions"
            )
        try:
            error: str | None = ours.recv()
        except EOFError:
            error = f"a process ended with exit code {process.wait()} while it imported the reward functions"
        if error is not None:
            self._end(server)
            raise ConfigError(error, key="rewards.functions")
        return server

    def _end(self, server: _Server, running: _Running | None = None) -> int:
        """End a process and its children, and return its exit code."""
        self._servers.remove(server)
        code = _kill(server)
        if running is not None:
            with socket.fromfd(server.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as ours:
                ours.shutdown(socket.SHUT_RDWR)  # ends the exchange even if a child that left the group lives
            running.exchange.join()
        server.connection.close()
        return code


def _exchange(server: _Server, message: bytes, samples: int, arrived: _Arrived) -> None:
    """Send a task and receive its outcomes, on a thread: a process that is stopped neither reads nor writes.

    No outcomes mean that the process has ended.
    """
    try:
        server.connection.send_bytes(message)
        while samples > 0:
            outcomes: list[ScoreOutcome] = server.connection.recv()
            samples -= len(outcomes)
            arrived.put((server, outcomes))
    except (OSError, EOFError):
        arrived.put((server, []))


def _kill(server: _Server) -> int:
    """Kill a process and those that it has started, all of one process group, and return its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    return server.process.wait()
