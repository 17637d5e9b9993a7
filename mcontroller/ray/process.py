"""WorkerProcess: the process of one rank, a Ray actor with the worker objects of one or several roles.

One Ray task, ``serve``, occupies the main thread as long as the process exists. It receives calls from the channel and
runs them one at a time, on the main thread, as the same code does under torchrun. The task fails when the process ends,
with Ray's cause. Queries are answered on another thread while a call is running.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ray
from typing_extensions import Buffer

from mcontroller.channel.address import Address, ChannelKeys
from mcontroller.channel.options import ChannelOptions
from mcontroller.channel.server import Reply, reserve_port
from mcontroller.channel.wire import CallHeader
from mcontroller.channel.worker import Endpoint, KeptResults
from mcontroller.config.imports import import_module
from mcontroller.devices import check_torch_without_gpu, compute_capability, device_of_rank
from mcontroller.errors import CallRejected, ConfigError, GroupError, WorkerError, before_changes, is_before_changes
from mcontroller.ray.node_processes import NodeProcess
from mcontroller.ray.rank_logs import RankLog
from mcontroller.ray.threads import chosen_threads, keep_freed_memory, set_threads, usable_cores
from mcontroller.ray.values.handles import ArgumentFailed, ArgumentLost, fetch
from mcontroller.ray.values.wire import Encoded, Packed, decode, encode, encode_result
from mcontroller.trace.recorder import PhaseTimer, TraceRecorder, recorder, set_recorder, start_timer
from mcontroller.transport import call_context, complete, finish, outline, reported_coordinates, resolve
from parallel_state.hangs.lines import calling_position, source_line
from parallel_state.hangs.record import RankRecord, RecordMemory, read_rank_record


@dataclass(frozen=True, slots=True)
class Identity:
    """The rank of a process, and its environment.

    Attributes:
        group: name of the group.
        rank: rank in the group.
        env: environment variables that torch and the worker read.
        device: index of its GPU among those that the process can see; None in a pool without GPUs.
        threads: threads that it computes with on the CPU; None for those that Ray has set.
        cuda: environment variables that CUDA reads; those that the process has already stay.
        logs: directory of the file of its output; None for Ray's alone.
        trace: the folder of the trace, and the name of this process in it; None if it is not recorded.
    """

    group: str
    rank: int
    env: Mapping[str, str]
    device: int | None = None
    threads: int | None = None
    cuda: Mapping[str, str] = field(default_factory=dict)
    logs: str | None = None
    trace: tuple[Path, str] | None = None


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Where a process runs.

    Attributes:
        node: address of its node.
        node_id: Ray's id of the node.
        pid: process id.
        log: the files on that node that its output goes to.
        address: its address on the channel.
        rendezvous_port: a port on its node that it has reserved for a rendezvous.
        process: the process as its node sees it.
        record: the descriptor of the record of its last collectives, see ``parallel_state.hangs.record``; None for
            none.
        cores: number of cores that it may run on.
        threads: threads that it computes with on the CPU; None for those that Ray has set.
        capability: compute capability of the GPUs of its node; None if it is unknown.
    """

    node: str
    node_id: str
    pid: int
    log: tuple[str, ...]
    address: Address
    rendezvous_port: int
    process: NodeProcess
    record: int | None = None
    cores: int = 1
    threads: int | None = None
    capability: tuple[int, int] | None = None


class ProcessPosition(NamedTuple):
    """What a process does, as it reports it itself.

    Attributes:
        stack: the stack of its main thread, as text.
        line: the line of the program that its main thread runs; empty if it runs no call.
        record: the record of its last collectives; None if there is none.
    """

    stack: str
    line: str
    record: RankRecord | None


KeptValue = tuple[GroupError | None, Encoded, Encoded]
"""How a call has ended: its error, the outline of its value, and the value."""


class WorkerProcess:
    """The worker objects of one rank by role, and the calls of their methods. ``launch`` starts it as a Ray actor.

    Args:
        keys: the keys of the group.
        options: settings of the channel.
    """

    def __init__(self, keys: ChannelKeys, options: ChannelOptions) -> None:
        self._roles: dict[str, Any] = {}
        self._identity = Identity("", -1, {})
        self._running: str | None = None
        self._inline_bytes = options.inline_bytes
        self._record = RecordMemory()
        self._records = False
        self._kept = KeptResults()
        queries: dict[str, Callable[..., None]] = {
            "position": lambda reply: reply(self._position()),
            "idle": lambda reply: reply(self._running is None),
            "value": self._read_value,
            "release": self._release,
        }
        node = ray.util.get_node_ip_address()
        self._endpoint = Endpoint(node, keys, queries, options.ports, _sockets_folder(), self._kept.release_all)
        self._reserved = reserve_port("", options.ports)
        self._info = ProcessInfo(
            node,
            ray.get_runtime_context().get_node_id(),
            os.getpid(),
            _logs(),
            self._endpoint.address,
            self._reserved.getsockname()[1],
            NodeProcess.this(),
            self._record.descriptor,
            usable_cores(),
            chosen_threads(),
            compute_capability(),
        )

    def get_info(self) -> ProcessInfo:
        """Return where this process runs. For a process that has ended, Ray raises instead."""
        return self._info

    def serve(self) -> None:
        """Run the calls that arrive on the channel, one at a time, as long as the process exists."""
        while True:
            self._answer(*self._endpoint.receive())

    def _answer(self, caller: bytes, header: CallHeader, data: memoryview, frames: list[Buffer]) -> None:
        """Run a call and send its answer."""
        number, keep = header.number, header.keep and self._identity.rank in header.returning
        timer = start_timer(number=number)
        kept: KeptValue | None = None
        if self._endpoint.cancellation.start(caller, number):
            error, outlined, encoded = self._run(header, data, frames, timer, keep)
            if keep or encoded.stored is not None:
                kept = error, outlined, encoded
            self._kept.finish((caller, number), kept)
            sent = _NOTHING if keep else encoded
            self._endpoint.answer(caller, number, sent.data, sent.frames, error, sent.stored is not None)
        else:  # who reads the value gets an error; the answer has none, because no rank has failed
            if keep:
                text = f"{header.role}.{header.method} was cancelled"
                kept = GroupError(text, role=header.role, method=header.method), _NOTHING, _NOTHING
            self._kept.finish((caller, number), kept)
            self._endpoint.answer(caller, number, _NOTHING.data)
        timer("answer")
        timer.end()

    def _run(
        self, header: CallHeader, data: memoryview, frames: list[Buffer], timer: PhaseTimer, keep: bool
    ) -> KeptValue:
        """Run a call; return its error, the outline of its value if that is kept, and the value if it is returned."""
        outlined = encoded = _NOTHING
        self._running = header.method
        if not self._records and "torch.distributed" in sys.modules:
            self._record_calls()
        try:
            with before_changes():
                args, kwargs = resolve(decode([(data, frames)])[0], fetch)
            frames.clear()
            timer("fetch")
            if header.role is None:
                value = _OF_PROCESS[header.method](self, *args)
            else:
                worker = self._roles[header.role]
                with call_context(worker, header.method):
                    value = complete(getattr(worker, header.method)(*args, **kwargs))
            timer(f"{header.role or 'process'}.{header.method}")
            del args, kwargs  # free them before the value is serialized
            if value is not None and self._identity.rank in header.returning:
                name = f"the result of {header.role}.{header.method} on rank {self._identity.rank}"
                outlined = encode_result(outline(value), sys.maxsize, name) if keep else _NOTHING
                encoded = encode_result(value, self._inline_bytes, name)
            return None, outlined, encoded
        except BaseException as raised:
            timer(f"failure {type(raised).__name__} {header.role}.{header.method}")
            return self._error_of(header.role or "", header.method, raised), _NOTHING, _NOTHING
        finally:
            self._running = None

    def build(self, identity: Identity, packed: Mapping[str, Packed]) -> None:
        """Set the identity of this process and construct its workers.

        Args:
            identity: the rank and its environment.
            packed: packed (class, ``Arguments``, imports) of the workers, by role.

        Raises:
            WorkerError: a worker's constructor raised.
        """
        self._identity, self._running = identity, "__init__"
        log = None if identity.logs is None else RankLog.open(identity.logs, identity.group, identity.rank)
        if identity.trace is not None:
            folder, lane = identity.trace
            about = {"group": identity.group, "rank": identity.rank, "launch": lane.rpartition("-")[0]}
            about["actor"] = ray.get_runtime_context().get_actor_id()
            made = TraceRecorder(folder, lane, about)
            set_recorder(made)
            made.write_in_background()
        for name, value in identity.cuda.items():
            os.environ.setdefault(name, value)
        os.environ.update(identity.env)
        if identity.threads is not None:
            set_threads(identity.threads)
        if identity.device is None:
            keep_freed_memory()
        for role, init in packed.items():
            try:
                choose_device(identity.device)  # before the module of the worker is imported
                construct, arguments, imports = init.unpack()  # loads torch, which reads the environment
                if not self._records and "torch.distributed" in sys.modules:
                    self._record_calls()
                for module in imports:
                    import_module(module, "imports")
                worker = construct(*arguments.args, **arguments.kwargs)
            except BaseException as error:  # report SystemExit too
                raise self._error_of(role, "__init__", error) from None
            self._roles[role] = worker
            _siblings[role] = worker
        coordinates = reported_coordinates(next(iter(self._roles.values())))
        _set_title(identity, coordinates)
        if log is not None:
            log.rename(coordinates)
        if (trace := recorder()) is not None:
            trace.describe(roles={role: reported_coordinates(worker) for role, worker in self._roles.items()})

    def finish(self) -> None:
        """Call ``before_shutdown`` of the workers of every role."""
        self._running = "before_shutdown"
        for role, worker in self._roles.items():
            try:
                finish(worker)
            except BaseException as error:
                raise self._error_of(role, "before_shutdown", error) from None
        if (trace := recorder()) is not None:
            trace.flush()

    def _record_calls(self) -> None:
        """Record collectives from now on; the program has imported torch."""
        from parallel_state.hangs.recorder import record_calls

        self._records = True
        record_calls(self._record)

    # ---- queries, answered on another thread -------------------------------------------------------------------------

    def _read_value(self, reply: Reply, caller: bytes, number: int, outlined: bool) -> None:
        """Reply with (error, data) of a kept value, or of its outline, and the frames."""

        def read(kept: KeptValue | None) -> None:
            if kept is None:
                reply((GroupError(f"the result of call {number} was released before it was read"), None))
            elif kept[0] is not None:
                reply((kept[0], None))
            else:
                encoded = kept[1] if outlined else kept[2]
                reply((None, encoded.data), encoded.frames)

        self._kept.read((caller, number), read)

    def _release(self, reply: Reply, caller: bytes, number: int) -> None:
        self._kept.release((caller, number))
        reply(None)

    def _position(self) -> ProcessPosition:
        """Return what the main thread does; called from another thread."""
        record = read_rank_record(os.getpid(), self._record.descriptor)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if self._running is None or frame is None:
            return ProcessPosition("idle: no call is running here", "", record)
        stack = f"in {self._running}\n" + "".join(traceback.format_stack(frame))
        return ProcessPosition(stack, source_line(*calling_position(frame)).line, record)

    def _error_of(self, role: str, method: str, error: BaseException) -> GroupError:
        if isinstance(error, ArgumentFailed):
            return error.error
        if isinstance(error, ArgumentLost) or (not role and isinstance(error, WorkerError)):
            return error
        rank = self._identity.rank
        cause = f"{type(error).__name__}: {_text(error)}"
        own_traceback = _own_traceback(error)
        kind = CallRejected if is_before_changes(error) else WorkerError
        return kind(
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


_NOTHING = encode(None, 0)

_OF_PROCESS: dict[str, Callable[..., None]] = {
    "__init__": WorkerProcess.build,
    "before_shutdown": WorkerProcess.finish,
}
"""The calls that go to the process, of the workers of all its roles."""

_siblings: dict[str, Any] = {}
"""The worker objects of this process by role."""


def sibling(role: str) -> Any:
    """Return, inside a worker, the worker object of another role of the same process.

    Raises:
        ConfigError: the process has no such role; the message lists those that it has.
    """
    if role not in _siblings:
        listed = ", ".join(sorted(_siblings)) or "none"
        raise ConfigError(f"no role {role!r} in this process; its roles: {listed}", key="role", value=role)
    return _siblings[role]


def _set_title(identity: Identity, coordinates: Mapping[str, int]) -> None:
    """Show the rank and its run in lists of processes, such as ``ray::actor rank 3 (tp=1 pp=0) · my_run``."""
    axes = " ".join(f"{axis}={index}" for axis, index in coordinates.items())
    title = f"ray::{identity.group} rank {identity.rank}" + (f" ({axes})" if axes else "")
    raylet: Any = ray._raylet
    raylet.setproctitle(title if identity.logs is None else f"{title} · {Path(identity.logs).absolute().parent.name}")


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


def _sockets_folder() -> str:
    """Return the folder of this user's sockets in the folder of the Ray session."""
    session: str = ray._private.worker.global_worker.node.get_session_dir_path()  # type: ignore[union-attr]
    return os.path.join(session, f"channel_{os.getuid()}")


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
