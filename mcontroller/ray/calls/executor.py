"""RayExecutor: the ranks of one role in the processes of a group."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from mcontroller.errors import GroupBroken, GroupError, WorkerDied
from mcontroller.ray.calls.call import GroupCall
from mcontroller.ray.calls.hangs import stopped_ranks
from mcontroller.ray.calls.supervision import GroupProcesses, error_of_process
from mcontroller.ray.values.handles import ArgumentFailed, ArgumentLost, StoredValue, ValuesLate, fetch
from mcontroller.ray.values.wire import pack
from mcontroller.transport import Arguments

STOPPED_SECONDS = 2.0
"""Time between two looks at the processes that ``before_shutdown`` waits for, and for their answers."""


class RayExecutor:
    """The ranks of ``role`` in the processes of a group; see ``mcontroller.transport.Executor``."""

    transport = "ray"

    def __init__(self, processes: GroupProcesses, role: str) -> None:
        self.processes = processes
        self.role = role
        processes.executors.add(self)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.processes.world_size

    @property
    def nodes(self) -> Sequence[str]:
        """The address of the node of every rank."""
        return self.processes.nodes

    @property
    def threads(self) -> Sequence[int | None]:
        """The threads that every rank computes with on the CPU; None for those that Ray has set."""
        return [info.threads for info in self.processes.handles.infos]

    def set_coordinates(self, coordinates: Sequence[Mapping[str, int]]) -> None:
        """Set the coordinates of each rank, by rank, for error messages."""
        self.processes.coordinates[self.role] = coordinates

    def share(self, value: Any, readers: int) -> Any:
        """Return a ``StoredValue`` if several ranks read a large value, else the value."""
        packed = pack(value) if readers > 1 else None
        if packed is None or not packed.is_large(self.processes.handles.options.inline_bytes):
            return value
        return StoredValue(ray.put(packed))

    def submit(
        self,
        method: str,
        arguments: Mapping[int, Arguments],
        returning: Sequence[int],
        *,
        timeout: float | None = None,
        keep: bool = False,
    ) -> GroupCall:
        """Send a call to its ranks; see ``mcontroller.transport.Executor.submit``."""
        with self.processes.sending:
            self.processes.check(self.role)
            return self.processes.send(self.role, method, arguments, returning, timeout=timeout, keep=keep)

    def fetch(self, handles: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Return the values of handles; raise the error of the call that failed to produce one.

        Raises:
            CallTimeout: a value has not arrived in ``timeout`` seconds.
            GroupBroken: the processes that had a value have ended.
        """
        try:
            return fetch(handles, timeout)
        except ArgumentFailed as failed:
            raise failed.error from None
        except ArgumentLost as lost:
            cause = error_of_process(lost.actor)
            if cause is None:
                raise
            text = f"values of {self.role} were in processes that have ended; first cause: {cause}"
            raise GroupBroken(text, role=self.role, first_cause=cause) from cause
        except ValuesLate as late:
            raise self.processes.values_late(late, timeout or 0.0) from None

    @property
    def broken(self) -> GroupError | None:
        """The failure that broke the group."""
        return self.processes.handles.cause

    def fail(self, error: GroupError) -> None:
        """Break the group; see ``mcontroller.transport.Executor.fail``."""
        self.processes.fail(error)

    def restart(self, timeout: float | None = None) -> None:
        """Replace the processes, with every role that they run; see ``GroupProcesses.restart``."""
        self.processes.restart(timeout)

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut down the processes, and with them every role that they run; see ``shutdown``."""
        shutdown(self.processes, timeout)


# ---- the end of a group that works ---------------------------------------------------------------------------------


def shutdown(processes: GroupProcesses, timeout: float | None = None) -> None:
    """Call ``before_shutdown`` of the workers, end the processes and free their slots.

    A second call does nothing. Workers are not called if a call (of this driver or another) is still running, if
    the group is broken, or if its processes are gone.

    Args:
        processes: the processes of the group.
        timeout: deadline of ``before_shutdown`` in seconds; None for no deadline.

    Raises:
        WorkerError: a worker's ``before_shutdown`` raised; the processes have been ended all the same.
        CallTimeout: ``before_shutdown`` did not return in time, or a process is stopped by a signal; the processes
            have been ended all the same.
        ResourceError: processes could not be ended. They keep their slots; a second call tries again.
    """
    try:
        with processes.sending:
            call = None
            if processes.is_idle(timeout):
                nothing = dict.fromkeys(range(processes.world_size), Arguments())
                call = processes.send(processes.name, "before_shutdown", nothing, timeout=timeout, of_process="finish")
        if call is not None:
            for keeping in tuple(processes.keeping):
                _read_before_end(processes, keeping, call)
            _await_end(processes, call)
    finally:
        processes.handles.end()
        processes.handles.check_ended(processes.name)


def _read_before_end(processes: GroupProcesses, keeping: GroupCall, last: GroupCall) -> None:
    """Read the values that the processes keep, before ``last`` is due, but not of a process that is stopped."""
    while not keeping.read_before_end(last.remaining(STOPPED_SECONDS) or 0.0):
        _break_if_stopped(processes, last, keeping.ranks)
        if last.remaining() == 0.0:
            return


def _break_if_stopped(processes: GroupProcesses, call: GroupCall, ranks: Sequence[int]) -> None:
    if stopped_ranks(processes.handles.infos, ranks, STOPPED_SECONDS):
        call.end_late(time.monotonic() - call.started)
        call.check()


def _await_end(processes: GroupProcesses, call: GroupCall) -> None:
    """Wait for ``before_shutdown`` of all workers, but not for a process that is stopped by a signal."""
    with contextlib.suppress(WorkerDied):
        while (left := call.remaining()) is None or left > STOPPED_SECONDS:
            if call.wait(STOPPED_SECONDS):
                break
            _break_if_stopped(processes, call, sorted(call.pending))
        call.check()
