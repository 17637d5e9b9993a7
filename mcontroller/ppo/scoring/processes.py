"""Processes that call reward functions: tasks with deadlines, and new processes for those that hang or die."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from mcontroller.errors import ConfigError
from mcontroller.ppo.scoring.config import RewardFunctionConfig
from mcontroller.ppo.scoring.server import Sample, ScoreOutcome

__all__ = ["ScoringProcesses", "Task"]

SERVER = "import sys; from mcontroller.ppo.scoring.server import serve_descriptor; serve_descriptor(int(sys.argv[1]))"
START_TIMEOUT_S = 300.0
"""Longest time in which a process starts and imports the functions."""


@dataclass(frozen=True)
class Task:
    """Samples that one process scores in one call.

    Attributes:
        name: the name of the function.
        samples: the arguments of each sample.
        indices: the positions of the samples in the batch.
        margin_s: [s] time after the deadline before the process is killed.
    """

    name: str
    samples: Sequence[Sample]
    indices: Sequence[int]
    margin_s: float = 0.0


@dataclass
class _Server:
    process: subprocess.Popen[bytes]
    connection: Connection


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

    def run(self, tasks: Sequence[Task]) -> list[list[ScoreOutcome]]:
        """Return the outcomes of the samples of every task, in order.

        A process that does not return in time is killed, and the next task starts another one.

        Raises:
            ConfigError: a process cannot import a function, or ``close`` was called.
        """
        results: dict[int, list[ScoreOutcome]] = {}
        pending = deque(range(len(tasks)))
        running: dict[Connection, tuple[_Server, int, float]] = {}
        while pending or running:
            while pending and len(running) < self.processes:
                index = pending.popleft()
                server = self._idle.pop() if self._idle else self._start()
                server.connection.send((tasks[index].name, tasks[index].samples))
                deadline = time.monotonic() + self.timeout_s + tasks[index].margin_s
                running[server.connection] = (server, index, deadline)
            next_deadline = min(deadline for _, _, deadline in running.values())
            wait(list(running), max(0.0, next_deadline - time.monotonic()))
            for connection, (server, index, deadline) in list(running.items()):
                outcomes = self._finished(server, tasks[index], time.monotonic() >= deadline)
                if outcomes is not None:
                    del running[connection]
                    results[index] = outcomes
        return [results[index] for index in range(len(tasks))]

    def close(self) -> None:
        """End every process. A call of ``run`` in another thread ends."""
        self._closed = True
        for server in list(self._servers):
            server.process.kill()
            server.process.wait()

    def _finished(self, server: _Server, task: Task, is_late: bool) -> list[ScoreOutcome] | None:
        """Return the outcomes of a task if it has ended, in time or not; None if it still runs."""
        if server.connection.poll():
            try:
                outcomes: list[ScoreOutcome] = server.connection.recv()
            except (EOFError, ConnectionResetError):
                return self._lost(server, task, f"its process ended with exit code {server.process.wait()}")
            self._idle.append(server)
            return outcomes
        return self._lost(server, task, f"it did not return within {self.timeout_s:g} s") if is_late else None

    def _lost(self, server: _Server, task: Task, reason: str) -> list[ScoreOutcome]:
        self._end(server)
        return [ScoreOutcome(error=reason)] * len(task.samples)

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

    def _end(self, server: _Server) -> None:
        self._servers.remove(server)
        server.connection.close()
        server.process.kill()
        server.process.wait()
