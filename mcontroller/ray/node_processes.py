"""Processes as their node sees them: whether they run, how they are ended, and how they have ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcontroller.ray.warm_start import exits

NODE_SECONDS = 15.0
"""Timeout of a question to another node, by a task for which Ray may have to start a process there."""

STATUS_SECONDS = 2.0
"""Time until the parent of a process that has ended has recorded how."""


class NodeProcess(NamedTuple):
    """A process of a node.

    Attributes:
        pid: process id.
        started: when it started, in clock ticks since the boot: another process may get its id later.
        exits: the file in which its parent records its end; None if it has no warm parent.
        namespace: the namespace of process ids that it is in; empty if the system does not say.
    """

    pid: int
    started: int
    exits: str | None
    namespace: str = ""

    @classmethod
    def this(cls) -> NodeProcess:
        """Return the calling process."""
        return cls(os.getpid(), int(_stat(os.getpid())[19]), exits.record_of_this_process(), _namespace())

    @property
    def state(self) -> str:
        """Its state as ps has it: R, S, D, T (stopped), Z (ended, and not yet reaped) ...; "" if it is gone."""
        try:
            state, started = (_stat(self.pid)[index] for index in (0, 19))
        except OSError:
            return ""
        return "" if int(started) != self.started else state

    @property
    def is_visible(self) -> bool:
        """Whether it runs, and the calling process, on whatever node, sees that."""
        return self.has_our_namespace and self.runs

    @property
    def has_our_namespace(self) -> bool:
        """Whether its process id means the same process for the calling one."""
        return bool(self.namespace) and self.namespace == _namespace()

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.state not in ("", "Z", "X")


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _namespace() -> str:
    """Return what identifies the process ids of this process: the boot of its machine, and the namespace there."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def begin_on_node(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """Start a function on another node; return the reference of its value."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(*args)


def on_node(node_id: str, function: Callable[..., Any], *args: Any, timeout: float = NODE_SECONDS) -> Any:
    """Call a function on a node; in this process if this is the node.

    Raises:
        RayError: the node is gone.
        TimeoutError: it did not answer in time.
    """
    if node_id == ray.get_runtime_context().get_node_id():
        return function(*args)
    return ray.get(begin_on_node(node_id, function, *args), timeout=timeout)


def wait_for_ends(processes: Sequence[NodeProcess]) -> list[int]:
    """Wait until one of these processes of this node ends; return the places of all that have ended.

    Returns none at once if this process cannot see them.
    """
    visible = {place: process for place, process in enumerate(processes) if process.has_our_namespace}
    with contextlib.ExitStack() as descriptors:
        ends = select.poll()
        for process in visible.values():
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(process.pid)
                descriptors.callback(os.close, descriptor)
                ends.register(descriptor, select.POLLIN)
        ended = [place for place, process in visible.items() if not process.runs]
        while visible and not ended:
            ends.poll()
            ended = [place for place, process in visible.items() if not process.runs]
    return ended


def end_processes(processes: Sequence[NodeProcess], patience: float, seconds: float) -> dict[int, str]:
    """Wait until processes of this node have ended, and end those that have not.

    Args:
        processes: asked to end already.
        patience: seconds until they get SIGKILL. Those that are stopped get it at once: they cannot end by themselves.
        seconds: seconds after that until they are given up.

    Returns:
        By process id, why a process still runs.
    """
    _kill([process for process in processes if process.state in ("T", "t")])
    _wait_until(lambda: not any(process.state for process in processes), patience)  # reaped too
    left = [process for process in processes if process.runs]
    reasons = _kill(left)
    killed = [process for process in left if process.pid not in reasons]
    _wait_until(lambda: not any(process.runs for process in killed), seconds)
    late = {process.pid: f"in state {process.state} {seconds:g} s after SIGKILL" for process in killed if process.runs}
    return reasons | late


def _kill(processes: Sequence[NodeProcess]) -> dict[int, str]:
    """Send SIGKILL to processes; return by process id why that failed."""
    reasons: dict[int, str] = {}
    for process in processes:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except OSError as error:
            reasons[process.pid] = f"SIGKILL fails: {error.strerror}"
    return reasons


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)


def recorded_status(process: NodeProcess) -> int | None:
    """Return how a process of this node has ended: its exit code, or the negative number of a signal; None if unknown.

    Waits until its parent has recorded it.
    """
    end = time.monotonic() + STATUS_SECONDS
    while process.exits is not None:
        status = exits.status_in(process.exits, process.pid)
        if status is not None:
            return status
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return None
