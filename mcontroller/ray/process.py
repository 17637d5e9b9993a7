"""WorkerProcess: the process of one rank, a Ray actor with the worker objects of one or several roles.

Its methods run one at a time on the main thread of the process, as the same code does under torchrun. Queries that
must be answered while a call is running go to its control server.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray

from mcontroller.devices import check_torch_without_gpu, device_of_rank
from mcontroller.errors import GroupError, WorkerError
from mcontroller.ray.control import Cancellation, ControlAddress, start_control_server
from mcontroller.ray.wire import encode, open_argument, unpack
from mcontroller.transport import call_context, complete, finish, reported_coordinates, resolve, row_count

__all__ = [
    "ArgumentLost",
    "CallHeader",
    "Endpoint",
    "Identity",
    "ProcessInfo",
    "WorkerProcess",
    "choose_device",
    "fetch",
    "sibling",
]


@dataclass(frozen=True, slots=True)
class Identity:
    """The rank of a process, and its environment.

    Attributes:
        group: name of the group.
        rank: rank in the group.
        env: environment variables that torch and the worker read.
        device: index of its GPU among those that the process can see; None in a pool without GPUs.
    """

    group: str
    rank: int
    env: Mapping[str, str]
    device: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Where a process runs.

    Attributes:
        node: address of its node.
        node_id: Ray's id of the node.
        pid: process id.
        log: the files on that node that its output goes to.
        control: address of its control server.
    """

    node: str
    node_id: str
    pid: int
    log: tuple[str, ...]
    control: ControlAddress


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and port of the rendezvous of a group."""

    address: str
    port: int


class CallHeader(NamedTuple):
    """The header of a call to the ranks that get the same arguments; it is sent in front of the arguments.

    Attributes:
        caller: identifies the controller that sent the call.
        number: number of the call among those of the caller; numbers grow.
        role: the role whose worker runs the method.
        method: name of the method.
        returning: the ranks, of those with these arguments, whose values are sent back.
        measure: whether the row count of the value is returned too, as a second value.
    """

    caller: str
    number: int
    role: str
    method: str
    returning: Sequence[int]
    measure: bool


class WorkerProcess:
    """The worker objects of one rank by role, and the calls of their methods. ``launch`` starts it as a Ray actor."""

    def __init__(self) -> None:
        _keep_sigint_handler()
        self._roles: dict[str, Any] = {}
        self._identity = Identity("", -1, {})
        self._reserved: socket.socket | None = None
        self._running: str | None = None
        self._cancellation = Cancellation()
        node = ray.util.get_node_ip_address()
        handlers: dict[str, Callable[..., Any]] = {
            "stack": self._stack,
            "idle": lambda: self._running is None,
            "prepare": self._cancellation.prepare,
            "commit": self._cancellation.commit,
        }
        control = start_control_server(node, handlers)
        self._info = ProcessInfo(node, ray.get_runtime_context().get_node_id(), os.getpid(), _logs(), control)

    def get_info(self) -> ProcessInfo:
        """Return where this process runs. For a process that has ended, Ray raises instead."""
        return self._info

    def reserve_endpoint(self) -> Endpoint:
        """Return an endpoint on this node with a port that no other process gets.

        The socket stays bound, never listens, and has SO_REUSEADDR: the kernel does not assign the port to a process
        that asks for any free one, but torch's store, which sets SO_REUSEADDR too, can bind it and listen on it.
        """
        self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))
        return Endpoint(self._info.node, self._reserved.getsockname()[1])

    def build(self, identity: Identity, endpoint: Endpoint, roles: Mapping[str, Any], *packed: Any) -> None:
        """Set the identity of this process and construct its workers.

        Args:
            identity: the rank and its environment.
            endpoint: the rendezvous of the group.
            roles: role -> index into ``packed``.
            packed: packed (class, args, kwargs) of the workers.

        Raises:
            WorkerError: a worker's constructor raised.
        """
        self._identity, self._running = identity, "__init__"
        os.environ.update(identity.env, MASTER_ADDR=endpoint.address, MASTER_PORT=str(endpoint.port))
        for role, index in roles.items():
            try:
                choose_device(identity.device)  # before the module of the worker is imported
                construct, args, kwargs = open_argument(packed[index])[1]()  # loads torch, which reads the environment
                worker = construct(*args, **kwargs)
            except BaseException as error:  # report SystemExit too
                raise self._error_of(role, "__init__", error) from None
            self._roles[role] = worker
            _siblings[role] = worker
            if len(roles) > 1:
                worker.fused_worker_dict = _siblings
        self._running = None

    def call(self, message: Any) -> Any:
        """Run one method of one role.

        Args:
            message: a ``CallHeader`` and the packed ``Arguments`` after it, as ``Packed.as_argument`` returns them.

        Returns:
            The encoded value, or None if this rank does not return; for a measured call, with the row count as a pair.

        Raises:
            WorkerError: the method raised.
            ArgumentLost: the process producing an argument died.
        """
        header, read_arguments = open_argument(message)
        caller, number, role, method, returning, measure = header
        if not self._cancellation.start(caller, number):
            return (None, None) if measure else None
        self._running, rows = method, None
        try:
            args, kwargs = resolve(read_arguments(), fetch)
            worker = self._roles[role]
            with call_context(worker, method):
                value = complete(getattr(worker, method)(*args, **kwargs))
            del args, kwargs  # free them before the value is serialized
            if self._identity.rank not in returning:
                value = None
            elif measure:
                rows = row_count(value)
            value = encode(value)
        except BaseException as error:
            raise self._error_of(role, method, error) from None
        finally:
            self._running = None
        return (value, rows) if measure else value

    def finish(self) -> None:
        """Call ``before_shutdown`` of the workers of every role."""
        for role, worker in self._roles.items():
            self._running = "before_shutdown"
            try:
                finish(worker)
            except BaseException as error:
                raise self._error_of(role, "before_shutdown", error) from None
            finally:
                self._running = None

    def _stack(self) -> str:
        """Return the stack of the call that runs on the main thread, if any; called from another thread."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if self._running is None or frame is None:
            return "idle: no call is running here"
        return f"in {self._running}\n" + "".join(traceback.format_stack(frame))

    def _error_of(self, role: str, method: str, error: BaseException) -> GroupError:
        if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, GroupError):
            return error.cause  # an argument that another group failed to produce
        if isinstance(error, ArgumentLost):
            return error
        rank = self._identity.rank
        cause = f"{type(error).__name__}: {_text(error)}"
        own_traceback = _own_traceback(error)
        return WorkerError(
            f"{role} rank {rank} on {self._info.node}, pid {self._info.pid} failed in {method}: {cause}\n"
            f"{own_traceback}",
            role=role,
            rank=rank,
            coordinates=reported_coordinates(self._roles.get(role)),
            node=self._info.node,
            pid=self._info.pid,
            method=method,
            cause=cause,
            worker_traceback=own_traceback,
            followers=0,
            failed_at=time.time(),
        )


_siblings: dict[str, Any] = {}
"""The worker objects of this process by role."""


def sibling(role: str) -> Any:
    """Return, inside a worker, the worker object of another role of the same process.

    Raises:
        KeyError: the process has no such role; the message lists those that it has.
    """
    if role not in _siblings:
        raise KeyError(f"no role {role!r} in this process; it has {sorted(_siblings)}")
    return _siblings[role]


class ArgumentLost(GroupError):
    """The process producing an argument died; ``actor`` is Ray's id of the process."""

    actor: str


def fetch(handles: Any) -> list[Any]:
    """Return the values of object references, private to the caller.

    Raises:
        ArgumentLost: the process producing one of them died.
    """
    try:
        values = ray.get(list(handles))
    except ray.exceptions.ActorDiedError as error:
        raise ArgumentLost(f"process producing an argument died: {error}", actor=str(error.actor_id)) from None
    return [unpack(value) for value in values]


def _keep_sigint_handler() -> None:
    """Keep Ray from replacing the SIGINT handler while it reads the arguments of a task, for ``ray.cancel``.

    Calls are cancelled through the control server here, never by a signal. The replacement would undo a handler that
    native code has set, and takes 5% of an empty call.
    """
    from ray._private import utils

    if hasattr(utils, "DeferSigint"):
        utils.DeferSigint.create_if_main_thread = contextlib.nullcontext  # type: ignore[method-assign]


def choose_device(index: int | None) -> None:
    """Make the GPU of this index this thread's CUDA device; do nothing without an index.

    Raises:
        ResourceError: the process sees too few GPUs, or the node has a driver and torch can use no GPU.
    """
    if index is not None:
        import torch

        device = device_of_rank(index, int(os.environ["LOCAL_WORLD_SIZE"]))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            check_torch_without_gpu()


def _logs() -> tuple[str, ...]:
    streams = [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2) if os.path.exists(f"/proc/self/fd/{number}")]
    return tuple(dict.fromkeys(path for path in streams if path.startswith("/") and os.path.isfile(path)))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:
        return f"({type(failed).__name__} in its __str__)"


def _own_traceback(error: BaseException) -> str:
    """Return the traceback from the worker's own code on, without the frames of this project that lead to it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in _OUR_FILES:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


_OUR_FILES = (__file__, resolve.__code__.co_filename)
