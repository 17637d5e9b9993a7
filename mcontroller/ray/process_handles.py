"""ProcessHandles: the processes of a group as Ray knows them, and how they are ended."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from mcontroller.channel.hub import Hub
from mcontroller.channel.options import ChannelOptions
from mcontroller.ray.process import ProcessInfo
from mcontroller.ray.reservation import session

__all__ = ["ProcessHandles", "Releasable"]

END_SECONDS = 5.0
"""Time to wait until killed processes are gone."""


class Releasable(Protocol):
    """The slots that processes run in."""

    def release(self) -> None:
        """Free the slots, once the processes are gone."""


@dataclass(eq=False, slots=True)
class ProcessHandles:
    """The actors of a group and the slots that they hold, as needed to end them.

    Attributes:
        lease: the slots of the processes.
        options: settings of the channel.
        names: name of each process, by rank; detached processes are found by it.
        actors: Ray's handles of the processes, by rank.
        watched: a task of each process that does not end before the process does, by rank.
        infos: where each process runs, by rank; empty until all have reported it.
        hub: the connections to the processes, once there are any.
    """

    lease: Releasable
    options: ChannelOptions
    names: list[str] = field(default_factory=list)
    actors: list[Any] = field(default_factory=list)
    watched: list[Any] = field(default_factory=list)
    infos: list[ProcessInfo] = field(default_factory=list)
    hub: Hub | None = None
    _killed: bool = False
    _freed: bool = False
    _session: tuple[str, str] | None = field(default_factory=session)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def reachable(self) -> bool:
        """Whether this driver is still connected to the Ray cluster that the processes were started on."""
        return self._session is not None and self._session == session()

    @property
    def ended(self) -> bool:
        """Whether the processes were killed, or are out of reach."""
        return self._killed or not self.reachable

    @property
    def killed(self) -> bool:
        """Whether this driver has ended the processes."""
        return self._killed

    @property
    def actor_ids(self) -> list[str]:
        """Ray's id of each process."""
        return [actor._actor_id.hex() for actor in self.actors]

    def deaths(self, timeout: float = 0.0) -> dict[int, BaseException]:
        """Return Ray's error for each process that has ended, by rank; wait ``timeout`` seconds for the first."""
        if not self.watched or not self.reachable:
            return {}
        ready, _ = ray.wait(self.watched, num_returns=len(self.watched), timeout=timeout, fetch_local=False)
        known = set(ready)
        errors = {rank: _error_or_none(ref) for rank, ref in enumerate(self.watched) if ref in known}
        return {rank: error for rank, error in errors.items() if error is not None}

    def end(self) -> None:
        """Kill the processes, wait until they are gone, and free their slots.

        A second call does nothing, unless the first was interrupted: then it does the same again.
        """
        with self._lock:
            self._killed = True
            if not self._freed and self.reachable:
                self._kill()
                self.lease.release()
                self._freed = True
            if self.hub is not None:
                self.hub.close()

    def _kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        deadline = time.monotonic() + END_SECONDS
        if self.watched:
            ray.wait(self.watched, num_returns=len(self.watched), timeout=END_SECONDS, fetch_local=False)
        here = ray.get_runtime_context().get_node_id()
        for info in self.infos:
            while info.node_id == here and _is_running(info.pid) and time.monotonic() < deadline:
                time.sleep(0.002)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _error_or_none(ref: Any) -> RayError | None:
    try:
        ray.get(ref)
    except RayError as error:
        return error
    return None
