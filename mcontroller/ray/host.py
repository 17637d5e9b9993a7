"""The process of a rank: a Ray actor that holds the worker objects of one or several roles.

Its methods run one at a time on the process's main thread, where the same code would run under torchrun. What must
be answered while a call is running is asked at its desk: where the call stands, and whether it has begun.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray

from mcontroller.devices import device_of_rank
from mcontroller.errors import GroupError, WorkerError
from mcontroller.ray.desk import Desk, open_desk
from mcontroller.ray.gate import Gate, Ticket
from mcontroller.ray.wire import carried, opened, unpack

__all__ = ["ArgumentLost", "Endpoint", "HostInfo", "Identity", "Order", "WorkerHost", "siblings"]


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
    desk: Desk


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the ranks of a group meet."""

    address: str
    port: int


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
        _leave_sigint_alone()
        self._roles: dict[str, Any] = {}
        self._identity = Identity("", -1, {})
        self._reserved: socket.socket | None = None
        self._running: str | None = None
        self._gate = Gate()
        node = ray.util.get_node_ip_address()
        answers = {"stack": self._stack, "idle": lambda: self._running is None}
        desk = open_desk(node, {**answers, "hold": self._gate.hold, "decide": self._gate.decide})
        self._info = HostInfo(node, ray.get_runtime_context().get_node_id(), os.getpid(), _logs(), desk)

    def introduce(self) -> HostInfo:
        """Who this process is; asked again, whether it lives: the answer of one that is gone is an error of Ray's."""
        return self._info

    def reserve_endpoint(self) -> Endpoint:
        """A port that stays this process's own.

        The socket stays bound, never listens, and lets its address be reused: the kernel gives the port to nobody
        who asks for any free one, while torch's store, which reuses addresses, can bind and listen on it.
        """
        self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))
        return Endpoint(self._info.node, self._reserved.getsockname()[1])

    def build(self, identity: Identity, endpoint: Endpoint, roles: Mapping[str, Any], *packed: Any) -> None:
        """Takes on an identity and constructs the workers of ``roles``: role -> index into ``packed``."""
        self._identity, self._running = identity, "__init__"
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

    def call(self, sent: Any) -> Any:
        """Runs one method of one role: an ``Order``, and behind it the arguments."""
        (caller, number, role, method, shippers, measure), arguments = opened(sent)
        if not self._gate.begin(Ticket(caller, number)):
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

    def _stack(self) -> str:
        """Where the call stands that runs on the main thread; asked from another."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if self._running is None or frame is None:
            return "idle: no call is running here"
        return f"in {self._running}\n" + "".join(traceback.format_stack(frame))

    def _failure(self, role: str, method: str, error: BaseException) -> GroupError:
        if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, GroupError):
            return error.cause  # an argument that another group failed to make
        if isinstance(error, ArgumentLost):
            return error
        rank = self._identity.rank
        cause = f"{type(error).__name__}: {_text(error)}"
        told = _own_traceback(error)
        return WorkerError(
            f"{role} rank {rank} on {self._info.node}, pid {self._info.pid} failed in {method}: {cause}\n{told}",
            role=role,
            rank=rank,
            coordinates={},
            node=self._info.node,
            pid=self._info.pid,
            method=method,
            cause=cause,
            worker_traceback=told,
            followers=0,
            failed_at=time.time(),
        )


siblings: dict[str, Any] = {}
"""The worker objects of this process by role."""


class ArgumentLost(GroupError):
    """The process has died that was to make an argument; ``actor`` is Ray's id of it."""

    actor: str


def fetch(handles: Any) -> list[Any]:
    """The values behind object references, private to the caller. Raises ArgumentLost where their maker died."""
    try:
        values = ray.get(list(handles))
    except ray.exceptions.ActorDiedError as error:
        text = f"the process that was to make an argument has died: {error}"
        raise ArgumentLost(text, actor=str(error.actor_id)) from None
    return [unpack(value) for value in values]


def _leave_sigint_alone() -> None:
    """Ray exchanges the handler of SIGINT around the reading of every task's arguments, for ``ray.cancel``.

    Calls are taken back at the gate here, never by a signal. The exchange undoes what native code of the worker's has
    set, and takes a twentieth of an empty call.
    """
    from ray._private import utils

    if hasattr(utils, "DeferSigint"):
        utils.DeferSigint.create_if_main_thread = contextlib.nullcontext  # type: ignore[method-assign]


def _choose_device(index: int | None) -> None:
    """Makes this thread's CUDA device the one LOCAL_RANK counts; a cluster may count GPUs that torch cannot use."""
    if index is not None:
        import torch

        device = device_of_rank(index, int(os.environ["LOCAL_WORLD_SIZE"]))
        if device.type == "cuda":
            torch.cuda.set_device(device)


def _logs() -> tuple[str, ...]:
    streams = [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2) if os.path.exists(f"/proc/self/fd/{number}")]
    return tuple(dict.fromkeys(path for path in streams if path.startswith("/") and os.path.isfile(path)))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:
        return f"({type(failed).__name__} where its text was asked for)"


def _own_traceback(error: BaseException) -> str:
    """The traceback from the worker's own code on: the frames that only carried the call there are left out."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_carrier(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _is_carrier(filename: str) -> bool:
    return filename == __file__ or filename.endswith(os.path.join("mcontroller", "executor.py"))
