"""ProcessHandles: the processes of a group as Ray knows them, and how they are ended."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from mcontroller.channel.hub import Hub
from mcontroller.channel.options import ChannelOptions
from mcontroller.errors import ResourceError
from mcontroller.ray.node_processes import NODE_SECONDS, NodeProcess, begin_on_node, end_processes, wait_for_ends
from mcontroller.ray.process import ProcessInfo
from mcontroller.ray.reservation import session

__all__ = ["ProcessEnded", "ProcessHandles", "Releasable"]

END_SECONDS = 5.0
"""Time to wait until processes that Ray has killed are gone, before they get SIGKILL."""

KILL_SECONDS = 10.0
"""Time to wait until processes that got SIGKILL are gone."""

REPORT_SECONDS = 0.3
"""Time in which Ray reports the end of a process whose connections are closed."""

_log = logging.getLogger(__name__)


class ProcessEnded(Exception):
    """A process has ended, although Ray does not report it."""

    def __init__(self) -> None:
        super().__init__("Ray has not noticed it: a process that it has forked keeps its connections open")


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
        remaining: the processes that the last ``end`` could not end, with node, process id and reason.
    """

    lease: Releasable
    options: ChannelOptions
    names: list[str] = field(default_factory=list)
    actors: list[Any] = field(default_factory=list)
    watched: list[Any] = field(default_factory=list)
    infos: list[ProcessInfo] = field(default_factory=list)
    hub: Hub | None = None
    remaining: list[str] = field(default_factory=list)
    _seen: dict[int, NodeProcess] = field(default_factory=dict)
    _watches: dict[Any, list[int]] = field(default_factory=dict)
    _ended_elsewhere: set[int] = field(default_factory=set)
    _unreported: set[int] = field(default_factory=set)
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

    def watch(self) -> None:
        """Find out which processes this one can see, and have the nodes of the others watch them.

        Called when all processes have reported where they run.
        """
        self._seen = {rank: info.process for rank, info in enumerate(self.infos) if info.process.is_seen}
        elsewhere: dict[str, list[int]] = {}
        for rank, info in enumerate(self.infos):
            if rank not in self._seen:
                elsewhere.setdefault(info.node_id, []).append(rank)
        for node, ranks in elsewhere.items():
            watch = begin_on_node(node, wait_for_ends, [self.infos[rank].process for rank in ranks])
            self._watches[watch] = ranks

    def deaths(self, timeout: float = 0.0) -> dict[int, BaseException]:
        """Return the error of each process that has ended, by rank; wait ``timeout`` seconds for Ray's first.

        Ray notices the end of a process by its connections, which a child that the process has forked keeps open. So
        the processes are looked at too: here if this process can see them, else by a task on their node.
        """
        if not self.watched or not self.reachable:
            return {}
        ended = [rank for rank, process in self._seen.items() if not process.runs]
        ended += self._ends_on_other_nodes()
        errors = self._reported(range(len(self.watched)), timeout)
        silent = [rank for rank in ended if rank not in errors and rank not in self._unreported]
        if silent:
            errors |= self._reported(silent, REPORT_SECONDS)
            self._unreported.update(silent)
        return {rank: ProcessEnded() for rank in ended} | errors

    def _ends_on_other_nodes(self) -> set[int]:
        """Return the ranks whose end a task on their node has found."""
        if self._watches:
            watches = list(self._watches)
            done, _ = ray.wait(watches, num_returns=len(watches), timeout=0, fetch_local=False)
            for watch in done:
                ranks = self._watches.pop(watch)
                with contextlib.suppress(RayError):  # the node is lost, which Ray reports for its processes
                    self._ended_elsewhere.update(ranks[place] for place in ray.get(watch))
        return self._ended_elsewhere

    def _reported(self, ranks: Sequence[int], timeout: float) -> dict[int, BaseException]:
        """Return Ray's error for each of these processes that has ended; wait ``timeout`` seconds for the first."""
        watched = [self.watched[rank] for rank in ranks]
        ready, _ = ray.wait(watched, num_returns=len(watched), timeout=timeout, fetch_local=False)
        known = set(ready)
        errors = {rank: _error_or_none(self.watched[rank]) for rank in ranks if self.watched[rank] in known}
        return {rank: error for rank, error in errors.items() if error is not None}

    def end(self) -> None:
        """Kill the processes, wait until they are gone, and free their slots.

        If a process cannot be ended, its slots stay taken, because it still has its memory; ``remaining`` names it. A
        second call does nothing, unless the first was interrupted or processes remain: then it does the same again.
        """
        with self._lock:
            self._killed = True
            if not self._freed and self.reachable:
                self.remaining = self._kill()
                if self.remaining:
                    _log.error("processes could not be ended, and keep their slots: %s", "; ".join(self.remaining))
                else:
                    self.lease.release()
                    self._freed = True
            if self.hub is not None:
                self.hub.close()

    def check_ended(self, name: str) -> None:
        """Raise ResourceError if the last ``end`` could not end a process of the group ``name``."""
        if self.remaining:
            raise ResourceError(
                f"group {name} has processes that could not be ended, and that keep their slots: "
                f"{'; '.join(self.remaining)}. End them on their nodes, then call shutdown again",
                name=name,
                processes=self.remaining,
            )

    def _kill(self) -> list[str]:
        """Kill the processes and wait for their end on every node; return those that remain."""
        for actor in self.actors:
            ray.kill(actor)
        by_node: dict[str, list[ProcessInfo]] = {}
        for info in self.infos:
            by_node.setdefault(info.node_id, []).append(info)
        here = ray.get_runtime_context().get_node_id()
        limits = END_SECONDS, KILL_SECONDS
        elsewhere = {
            node: begin_on_node(node, end_processes, [info.process for info in infos], *limits)
            for node, infos in by_node.items()
            if node != here
        }
        reasons = {here: end_processes([info.process for info in by_node.get(here, [])], *limits)}
        end = time.monotonic() + sum(limits) + NODE_SECONDS
        for node, reference in elsewhere.items():
            reasons[node] = _reasons(reference, node, by_node[node], max(0.0, end - time.monotonic()))
        if self.watched:  # processes that have not said where they run are known to Ray alone
            timeout = REPORT_SECONDS if self.infos else END_SECONDS
            ray.wait(self.watched, num_returns=len(self.watched), timeout=timeout, fetch_local=False)
        return [
            f"pid {info.pid} on {info.node}: {reasons[node][info.pid]}"
            for node, infos in by_node.items()
            for info in infos
            if info.pid in reasons[node]
        ]


def _reasons(reference: Any, node: str, infos: Sequence[ProcessInfo], timeout: float) -> dict[int, str]:
    try:
        found: dict[int, str] = ray.get(reference, timeout=timeout)
    except (RayError, TimeoutError) as error:
        if node not in {each["NodeID"] for each in ray.nodes() if each["Alive"]}:
            return {}  # the processes have ended with their node
        return {info.pid: f"unknown, its node does not answer: {type(error).__name__}" for info in infos}
    return found


def _error_or_none(ref: Any) -> RayError | None:
    try:
        ray.get(ref)
    except RayError as error:
        return error
    return None
