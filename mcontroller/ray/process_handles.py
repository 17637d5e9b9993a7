"""ProcessHandles: the processes of a group as Ray knows them, and how they are ended."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from mcontroller.channel.controller import Hub
from mcontroller.channel.options import ChannelOptions
from mcontroller.errors import GroupBroken, GroupError
from mcontroller.ray.node_processes import NODE_SECONDS, NodeProcess, begin_on_node, end_processes, session
from mcontroller.ray.process import ProcessInfo

END_SECONDS = 5.0
"""Time to wait until processes that Ray has killed are gone, before they get SIGKILL."""

KILL_SECONDS = 10.0
"""Time to wait until processes that got SIGKILL are gone."""

REPORT_SECONDS = 0.3
"""Time in which Ray reports the end of a process whose connections are closed."""

CONNECT_SECONDS = 0.3
"""Timeout of a connection that is only made to find out whether a node has closed a port."""

_log = logging.getLogger(__name__)


class GroupState(enum.Enum):
    """The state of the processes of a group."""

    STARTING = "starting"
    """Not all workers are constructed."""
    READY = "ready"
    """No call of this controller is in flight."""
    BUSY = "busy"
    """Calls of this controller are in flight."""
    BROKEN = "broken"
    """The processes were ended because of a failure, which the group knows. A restart starts others."""
    RESTARTING = "restarting"
    """Others are being started in their place."""
    ENDED = "ended"
    """The processes were ended on purpose, or replaced, or the Ray cluster is gone."""


_NEXT = {
    GroupState.STARTING: {GroupState.READY, GroupState.BROKEN, GroupState.ENDED},
    GroupState.READY: {GroupState.BROKEN, GroupState.ENDED},  # or busy, which follows from the calls in flight
    GroupState.BROKEN: {GroupState.RESTARTING},
    GroupState.RESTARTING: {GroupState.BROKEN, GroupState.ENDED},
    GroupState.ENDED: set[GroupState](),
}
"""The states that may follow each state of processes."""


class ProcessEnded(Exception):
    """A process has ended, although Ray does not report it.

    Args:
        text: how that is known.
        node_gone: whether its node is gone too, so that nothing can be read there.
    """

    def __init__(self, text: str, node_gone: bool = False) -> None:
        super().__init__(text)
        self.node_gone = node_gone


@dataclass(eq=False, slots=True, weakref_slot=True)
class ProcessHandles:
    """The actors of a group and the slots that they hold, as needed to end them.

    Attributes:
        release: frees the slots of the processes, once they are gone.
        options: settings of the channel.
        names: name of each process, by rank; detached processes are found by it.
        actors: Ray's handles of the processes, by rank.
        watched: a task of each process that does not end before the process does, by rank.
        infos: where each process runs, by rank; empty until all have reported it.
        hub: the connections to the processes, once there are any.
        state: the state of the processes; ``enter`` changes it.
        cause: the failure because of which they were ended; None if they run, or were shut down.
        gone: Ray's ids of the nodes that are gone, with all their processes.
        killed: whether this driver has ended the processes.
        running: the processes that SIGKILL has not ended, which keep the slots of the group.
    """

    release: Callable[[], None]
    options: ChannelOptions
    names: list[str] = field(default_factory=list)
    actors: list[Any] = field(default_factory=list)
    watched: list[Any] = field(default_factory=list)
    infos: list[ProcessInfo] = field(default_factory=list)
    hub: Hub | None = None
    state: GroupState = GroupState.STARTING
    cause: GroupError | None = None
    gone: set[str] = field(default_factory=set)
    killed: bool = False
    running: list[str] = field(default_factory=list)
    _visible: dict[int, NodeProcess] = field(default_factory=dict)
    _freed: bool = False
    _session: object = field(default_factory=session)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def enter(self, state: GroupState, cause: GroupError | None = None) -> None:
        """Change the state if it may follow the present one: the first failure stays the cause.

        Args:
            state: the next state.
            cause: the failure, if it is broken.
        """
        with self._lock:
            if state in _NEXT[self.state]:
                self.cause = self.cause or cause
                self.state = state

    @property
    def reachable(self) -> bool:
        """Whether this driver is still connected to the Ray cluster that the processes were started on."""
        return self._session is not None and self._session == session()

    @property
    def ended(self) -> bool:
        """Whether the processes were killed, or are out of reach."""
        return self.killed or not self.reachable

    def broken_error(self, role: str) -> GroupBroken:
        """Return the error of a call of ``role``, or of a read, after the failure ``cause``."""
        text = f"group {role} is broken and its processes are stopped; first cause: {self.cause}"
        error = GroupBroken(text, role=role, first_cause=self.cause)
        error.__cause__ = self.cause
        return error

    @property
    def actor_ids(self) -> list[str]:
        """Ray's id of each process."""
        return [actor._actor_id.hex() for actor in self.actors]

    def watch(self, changed: Callable[[], None]) -> list[int]:
        """Have Ray watch the processes. Called when all have reported where they run.

        Args:
            changed: called on any thread when one of them may have ended.

        Returns:
            Descriptors of the processes that this one can see, which are ready to be read if they have ended.
        """
        self._visible = {rank: info.process for rank, info in enumerate(self.infos) if info.process.is_visible}
        for reference in self.watched:
            reference.future().add_done_callback(lambda _: changed())
        descriptors = []
        for process in self._visible.values():
            with contextlib.suppress(ProcessLookupError):
                descriptors.append(os.pidfd_open(process.pid))
        return descriptors

    def deaths(self, lost: Iterable[int]) -> dict[int, BaseException]:
        """Return the error of each process that has ended, by rank.

        Ray notices the end of a process by its connections. A child that the process has forked may keep them open: a
        warm parent ends such children with the process, and processes that this one can see are looked at too. And Ray
        needs about 14 s to notice that a node is gone, of which the closed port of its raylet is a sign.

        Args:
            lost: ranks whose connections are lost.
        """
        if not self.watched or not self.reachable:
            return {}
        ended = {rank for rank, process in self._visible.items() if not process.runs}
        errors = self._reported(range(len(self.watched)), 0)
        if ended - errors.keys():
            errors |= self._reported(sorted(ended - errors.keys()), REPORT_SECONDS)
        unreported = f"Ray has not reported it in {REPORT_SECONDS:g} s: it is late, or a child has the connections open"
        errors = {rank: ProcessEnded(unreported) for rank in ended} | errors
        hidden_ranks = [rank for rank in lost if rank not in self._visible]
        addresses = {rank: self.infos[rank].address for rank in hidden_ranks}
        closed = [rank for rank, address in addresses.items() if is_port_closed(address.host, address.call_port)]
        self._look_for_lost_nodes({self.infos[rank].node_id for rank in (*errors, *closed)})
        text = "its node {} is gone: neither the process nor Ray's raylet there accepts connections"
        gone = {rank: info for rank, info in enumerate(self.infos) if info.node_id in self.gone}
        return errors | {rank: ProcessEnded(text.format(info.node), node_gone=True) for rank, info in gone.items()}

    def _look_for_lost_nodes(self, nodes: set[str]) -> None:
        """Find out which of the nodes of processes that have ended are gone."""
        for node in ray.nodes() if nodes - self.gone else ():
            if node["NodeID"] in nodes and is_port_closed(node["NodeManagerAddress"], node["NodeManagerPort"]):
                self.gone.add(node["NodeID"])

    def _reported(self, ranks: Sequence[int], timeout: float) -> dict[int, BaseException]:
        """Return Ray's error for each of these processes that has ended; wait ``timeout`` seconds for the first."""
        watched = [self.watched[rank] for rank in ranks]
        ready, _ = ray.wait(watched, num_returns=len(watched), timeout=timeout, fetch_local=False)
        known = set(ready)
        errors = {rank: _error_or_none(self.watched[rank]) for rank in ranks if self.watched[rank] in known}
        return {rank: error for rank, error in errors.items() if error is not None}

    def end(self) -> None:
        """Kill the processes, wait until they are gone, and free their slots.

        If a process does not end, that is logged, and the group keeps its slots: another process there would share the
        GPU with it. A second call tries again, also after an interrupt; otherwise it does nothing.
        """
        with self._lock:
            self.killed = True
            self.enter(GroupState.ENDED)
            if not self._freed and self.reachable:
                self.running = self._kill()
                if self.running:
                    _log.error("these processes do not end, and keep their slots: %s", "; ".join(self.running))
                else:
                    self.release()
                    self._freed = True
            if self.hub is not None:
                self.hub.close()

    def _kill(self) -> list[str]:
        """Kill the processes, wait for their end on every node, and return those that still run."""
        for actor in self.actors:
            ray.kill(actor)
        by_node: dict[str, list[NodeProcess]] = {}
        for info in self.infos:
            if info.node_id not in self.gone:
                by_node.setdefault(info.node_id, []).append(info.process)
        here = by_node.pop(ray.get_runtime_context().get_node_id(), [])
        limits = END_SECONDS, KILL_SECONDS
        elsewhere = [begin_on_node(node, end_processes, processes, *limits) for node, processes in by_node.items()]
        running = end_processes(here, *limits)
        timeout = NODE_SECONDS + KILL_SECONDS  # longer than a process there is waited for
        ready, late = ray.wait(elsewhere, num_returns=len(elsewhere), timeout=timeout) if elsewhere else ([], [])
        for reference in ready:
            with contextlib.suppress(RayError):  # they have ended with their node
                running += ray.get(reference)
        if late:
            _log.error("%d of %d nodes did not say whether their processes have ended", len(late), len(by_node))
        if self.watched:  # processes that have not said where they run are known to Ray alone
            timeout = REPORT_SECONDS if self.infos else END_SECONDS
            ray.wait(self.watched, num_returns=len(self.watched), timeout=timeout, fetch_local=False)
        return running


def is_port_closed(host: str, port: int) -> bool:
    """Return whether a machine answers that no process listens on a port; False if it does not answer."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def _error_or_none(ref: Any) -> RayError | None:
    try:
        ray.get(ref)
    except RayError as error:
        return error
    return None
