"""RayExecutor: the ranks of one role in the processes of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcontroller.errors import GroupBroken, GroupError
from mcontroller.ray.calls.call import GroupCall
from mcontroller.ray.calls.shutdown import shutdown
from mcontroller.ray.calls.supervision import GroupProcesses, error_of_process
from mcontroller.ray.values.handles import ArgumentFailed, ArgumentLost, StoredValue, ValuesLate, fetch
from mcontroller.ray.values.wire import is_larger, store
from mcontroller.transport import Arguments


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
        if readers <= 1 or not is_larger(value, self.processes.handles.options.inline_bytes):
            return value
        return StoredValue(store(value))

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

    def restart(self, timeout: float | None = None) -> None:
        """Replace the processes, with every role that they run; see ``GroupProcesses.restart``."""
        self.processes.restart(timeout)

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut down the processes, and with them every role that they run; see ``shutdown``."""
        shutdown(self.processes, timeout)
