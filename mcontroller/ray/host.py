"""The process of a rank: a Ray actor that holds the worker objects of one or several roles.

Its methods run in three lanes. Roles are built and called in the call lane, one call at a time and always on the same
thread. The control lane answers while a call is running: who the process is, where its threads stand. The watch
lane never answers: what waits for it learns that the process is gone.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray

from mcontroller.errors import GroupError, WorkerError
from mcontroller.ray.wire import carried, opened, pack, unpack

__all__ = ["Endpoint", "HostInfo", "Identity", "Order", "Ticket", "WorkerHost", "siblings"]

LANES = {"call": 1, "control": 1, "watch": 1}
"""Threads by lane: calls one after another, and beside them what must answer while a call runs."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is: ``group`` names all of its ranks, ``env`` is what torch and the worker read."""

    group: str
    rank: int
    env: Mapping[str, str]
    device: int | None = None  # index into the visible GPUs, None without any


@dataclass(frozen=True, slots=True)
class HostInfo:
    """Where a process runs: ``node`` is its address, ``log`` the files that its output goes to, on that node."""

    node: str
    node_id: str
    pid: int
    log: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the ranks of a group meet."""

    address: str
    port: int


class Ticket(NamedTuple):
    """Names one call of one controller; its numbers grow."""

    caller: str
    number: int


class Order(NamedTuple):
    """What the ranks that get the same arguments are asked to do: the head of the arguments, for all of them alike."""

    caller: str
    number: int
    role: str
    method: str
    shippers: Sequence[int]
    measure: bool


class WorkerHost:
    """Holds worker objects by role and runs their methods; becomes an actor through ``ray.remote`` in ``hosts.py``."""

    def __init__(self) -> None:
        self._roles: dict[str, Any] = {}
        self._identity = Identity("", -1, {})
        node_id = ray.get_runtime_context().get_node_id()
        self._info = HostInfo(ray.util.get_node_ip_address(), node_id, os.getpid(), _logs())
        self._reserved: socket.socket | None = None
        self._running: str | None = None
        self._lane = 0
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._begun: dict[str, int] = {}
        self._held: set[Ticket] = set()
        self._withdrawn: set[Ticket] = set()

    @ray.method(concurrency_group="control")
    def introduce(self) -> HostInfo:
        return self._info

    @ray.method(concurrency_group="control")
    def reserve_endpoint(self) -> Endpoint:
        """A port that stays this process's own.

        The socket stays bound, never listens, and lets its address be reused: the kernel gives the port to nobody
        who asks for any free one, while torch's store, which reuses addresses, can bind and listen on it.
        """
        self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))
        return Endpoint(self._info.node, self._reserved.getsockname()[1])

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """Where the thread that runs the calls stands."""
        frame = sys._current_frames().get(self._lane)
        if self._running is None or frame is None:
            return "idle: no call is running here"
        return f"in {self._running}\n" + "".join(traceback.format_stack(frame))

    @ray.method(concurrency_group="control")
    def classes(self) -> dict[str, Any]:
        """The class of every role, packed, for a driver that attaches to a group it did not start."""
        return {role: pack(type(worker)) for role, worker in self._roles.items()}

    @ray.method(concurrency_group="control")
    def placement(self) -> Any:
        """The placement group that the process sits in."""
        return ray.util.get_current_placement_group()

    @ray.method(concurrency_group="control")
    def hold(self, ticket: Ticket) -> bool:
        """Keeps a call from beginning until ``decide``; False where it has begun already."""
        with self._turn:
            waits = ticket.number > self._begun.get(ticket.caller, -1)
            if waits:
                self._held.add(ticket)
            return waits

    @ray.method(concurrency_group="control")
    def decide(self, ticket: Ticket, withdraw: bool) -> None:
        """Lets a call that is held begin, or has it never begin."""
        with self._turn:
            self._held.discard(ticket)
            if withdraw:
                self._withdrawn.add(ticket)
            self._turn.notify_all()

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        threading.Event().wait()

    @ray.method(concurrency_group="call")
    def build(self, identity: Identity, endpoint: Endpoint, roles: Mapping[str, Any], *packed: Any) -> None:
        """Takes on an identity and constructs the workers of ``roles``: role -> index into ``packed``."""
        self._identity, self._running, self._lane = identity, "__init__", threading.get_ident()
        os.environ.update(identity.env, MASTER_ADDR=endpoint.address, MASTER_PORT=str(endpoint.port))
        from mcontroller.executor import run_method  # loads torch, which reads the environment

        self._run_method = run_method
        for role, index in roles.items():
            try:
                construct, args, kwargs = opened(packed[index])[1]()
                _choose_device(identity.device)
                worker = construct(*args, **kwargs)
            except BaseException as error:  # whatever ends a constructor is told, SystemExit too
                raise self._failure(role, "__init__", error) from None
            self._roles[role] = worker
            siblings[role] = worker
            if len(roles) > 1:
                worker.fused_worker_dict = siblings
        self._running = None

    @ray.method(concurrency_group="call")
    def call(self, sent: Any) -> Any:
        """Runs one method of one role: an ``Order``, and behind it the arguments."""
        head, arguments = opened(sent)
        caller, number, role, method, shippers, measure = pickle.loads(head)
        if not self._begin(Ticket(caller, number)):
            return (None, None) if measure else None
        self._running = method
        try:
            ship = self._identity.rank in shippers
            worker = self._roles[role]
            outcome = self._run_method(worker, method, arguments(), fetch=fetch, ship=ship, measure=measure)
            value = carried(outcome.value)
        except BaseException as error:
            raise self._failure(role, method, error) from None
        finally:
            self._running = None
        return (value, outcome.rows) if measure else value

    @ray.method(concurrency_group="call")
    def finish(self) -> None:
        """Has every role finish what it has under way."""
        from mcontroller.executor import finish

        for role, worker in self._roles.items():
            self._running = "before_shutdown"
            try:
                finish(worker)
            except BaseException as error:
                raise self._failure(role, "before_shutdown", error) from None
            finally:
                self._running = None

    def _begin(self, ticket: Ticket) -> bool:
        with self._lock:
            while ticket in self._held:
                self._turn.wait()
            self._begun[ticket.caller] = ticket.number
            if ticket in self._withdrawn:
                self._withdrawn.discard(ticket)
                return False
            return True

    def _failure(self, role: str, method: str, error: BaseException) -> GroupError:
        if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, GroupError):
            return error.cause  # an argument that another group failed to make
        rank = self._identity.rank
        cause = f"{type(error).__name__}: {error}"
        return WorkerError(
            f"{role} rank {rank} failed in {method}: {cause}",
            role=role,
            rank=rank,
            coordinates={},
            node=self._info.node,
            pid=self._info.pid,
            method=method,
            cause=cause,
            worker_traceback=_own_traceback(error),
            followers=0,
            failed_at=time.time(),
        )


siblings: dict[str, Any] = {}
"""The worker objects of this process by role."""


def fetch(handles: Any) -> list[Any]:
    """The values behind object references, private to the caller."""
    return [unpack(value) for value in ray.get(list(handles))]


def _choose_device(index: int | None) -> None:
    """Makes this thread's CUDA device the one LOCAL_RANK counts; a cluster may count GPUs that torch cannot use."""
    if index is not None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(index)


def _logs() -> tuple[str, ...]:
    streams = [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2) if os.path.exists(f"/proc/self/fd/{number}")]
    return tuple(dict.fromkeys(path for path in streams if path.startswith("/") and os.path.isfile(path)))


def _own_traceback(error: BaseException) -> str:
    """The traceback from the worker's own code on: the frames that only carried the call there are left out."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_carrier(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _is_carrier(filename: str) -> bool:
    return filename == __file__ or filename.endswith(os.path.join("mcontroller", "executor.py"))
