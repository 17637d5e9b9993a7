"""Processes as their node sees them: whether they run, how they are ended, and how they have ended.

Also whether this process is connected to the cluster that it has started processes in.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcontroller.machine import boot_id
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
        namespace: the namespace of process ids that it is in; empty for one that is not looked at.
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
        return bool(self.namespace) and self.namespace == _namespace() and self.runs

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.state not in ("", "Z", "X")


def _stat(pid: int) -> list[str]:
    # the title of a process, which is in front, may end in the middle of a character
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def _namespace() -> str:
    """Return what identifies the process ids of this process: the boot of its machine, and the namespace there."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


def session() -> object:
    """Return what identifies this driver's connection to its cluster, for comparison; None if it is not connected.

    A fork of the driver has none, although Ray's variables are there. Every call of a group asks several times: the ids
    of ``ray.get_runtime_context`` take 5 us, this takes 0.3 us.
    """
    return (os.getpid(), weakref.ref(ray._private.worker.global_worker.node)) if ray.is_initialized() else None


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


def end_processes(processes: Sequence[NodeProcess], patience: float, seconds: float) -> list[str]:
    """Wait until processes of this node have ended, and end those that have not.

    Args:
        processes: asked to end already.
        patience: seconds until they get SIGKILL. Those that are stopped get it at once: they cannot end by themselves.
        seconds: seconds after that until they are given up.

    Returns:
        The process id, the machine and the state of those that still run.
    """
    _kill([process for process in processes if process.state in ("T", "t")])
    _wait_until(lambda: not any(process.state for process in processes), patience)  # reaped too
    left = [process for process in processes if process.runs]
    _kill(left)
    _wait_until(lambda: not any(process.runs for process in left), seconds)
    return [f"pid {process.pid} on {gethostname()}, in state {process.state}" for process in left if process.runs]


def _kill(processes: Sequence[NodeProcess]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            os.kill(process.pid, signal.SIGKILL)


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
