"""Processes that call reward functions: tasks with deadlines, and new processes for those that hang or die."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass
class _Running:
    server: _Server
    task: Task
    deadline: float
    returned: int = 0


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

    def run(self, tasks: Sequence[Task]) -> dict[str, dict[int, ScoreOutcome]]:
        """Return the outcomes of the samples of every task, by the name of the function and the index of the sample.

        A process that does not return in time is killed, and the next task starts another one.

        Raises:
            ConfigError: a process cannot import a function, or ``close`` was called.
        """
        results: dict[str, dict[int, ScoreOutcome]] = {task.name: {} for task in tasks}
        pending = deque(tasks)
        running: dict[Connection, _Running] = {}
        while pending or running:
            while pending and len(running) < self.processes:
                task = pending.popleft()
                server = self._idle.pop() if self._idle else self._start()
                server.connection.send((task.name, task.samples))
                running[server.connection] = _Running(server, task, self._deadline(task))
            next_deadline = min(each.deadline for each in running.values())
            wait(list(running), max(0.0, next_deadline - time.monotonic()))
            for connection, each in list(running.items()):
                task, is_late = each.task, time.monotonic() >= each.deadline
                outcomes, lost = self._received(each, is_late)
                results[task.name].update(zip(task.indices[each.returned :], outcomes, strict=False))
                each.returned += len(outcomes)
                if outcomes:
                    each.deadline = self._deadline(task)
                left = list(zip(task.samples, task.indices, strict=True))[each.returned :]
                if lost and task.divisible and len(task.samples) > 1:
                    pending.extendleft(replace(task, samples=[sample], indices=[row]) for sample, row in left[::-1])
                elif lost:
                    results[task.name].update((row, ScoreOutcome(error=lost)) for _, row in left)
                if lost or not left:
                    del running[connection]
                if not left and not lost:
                    self._idle.append(each.server)
        return results

    def close(self) -> None:
        """End every process. A call of ``run`` in another thread ends."""
        self._closed = True
        for server in list(self._servers):
            server.process.kill()
            server.process.wait()

    def _deadline(self, task: Task) -> float:
        return time.monotonic() + self.timeout_s + task.margin_s

    def _received(self, running: _Running, is_late: bool) -> tuple[list[ScoreOutcome], str]:
        """Return the next outcomes of a task, if some have arrived, and why its process was lost, if it was."""
        server = running.server
        lost = ""
        if server.connection.poll():
            try:
                outcomes: list[ScoreOutcome] = server.connection.recv()
                return outcomes, ""
            except (EOFError, ConnectionResetError):
                lost = f"its process ended with exit code {server.process.wait()}"
        elif is_late:
            lost = f"it did not return within {self.timeout_s:g} s"
        if lost:
            self._end(server)
        return [], lost

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
