"""The end of a group that works: the last call of its workers, and the values that are still to be read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from mcontroller.errors import WorkerDied
from mcontroller.ray.calls.call import GroupCall
from mcontroller.ray.calls.hangs import stopped_ranks
from mcontroller.ray.calls.supervision import GroupProcesses
from mcontroller.transport import Arguments

STOPPED_SECONDS = 2.0
"""Time between two looks at the processes that ``before_shutdown`` waits for, and for their answers."""


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
