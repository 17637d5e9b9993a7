"""The warm parent: it imports the libraries that workers need, and forks a worker for each request.

A fork is safe as long as CUDA has not been initialized and no thread runs, so the parent imports libraries only, and
what worker classes name as safe (``Worker.warm_imports``). It ends when the file of anything that it has imported
changes.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil

from mcontroller.ray.warm_start import exits
from mcontroller.ray.warm_start.client import WARM_IMPORTS, folder_path

LIBRARIES = ("ray._private.workers.default_worker", "numpy", "torch", "tensordict", "zmq")
"""What is imported before workers are forked."""

IDLE_SECONDS = 120.0
"""The parent ends after this time without a worker."""

AGENTS_S = 3.0
"""[s] Time for Ray's agents to report that their raylet has ended, and to end: they notice it after 2 s."""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """A worker to fork.

    Attributes:
        command: its script and arguments.
        environment: its environment variables.
        folder: its current directory.
        streams: descriptors of its standard input, output and error.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    streams: Sequence[int]


class Parent:
    """Forks workers until the raylet of the node ends.

    Attributes:
        exits: the file in which it records how its workers have ended.

    Args:
        folder: descriptor of the folder of its socket.
        key: name of its socket there.
        raylet: process id of the raylet.
    """

    def __init__(self, folder: int, key: str, raylet: int) -> None:
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._raylet = os.pidfd_open(raylet)
        for name in LIBRARIES:
            _imported(name)
        import_warm(os.environ.get(WARM_IMPORTS, ""))
        gc.collect()
        gc.freeze()  # a collection in a worker would write to the pages of all these objects, and copy 94 MB of them
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        self._loaded = [file for file in files if file and os.path.exists(file)]
        self._loaded_at = self._times()
        self._agents = [child for child in psutil.Process(raylet).children() if child.name().endswith("Agent")]
        self._selector.register(self._raylet, selectors.EVENT_READ, self._end)
        _check_that_forks_are_safe()
        self._path = f"{folder_path(folder)}/{key}.sock"
        self._exits = exits.path_of(folder_path(folder), key)
        self.exits = exits.path_of(os.readlink(folder_path(folder)), key)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):  # of a parent that was killed
            os.unlink(self._path)
        self._listener.bind(self._path)
        self._listener.listen(1024)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._workers: set[int] = set()
        self._retired = False

    def serve(self) -> WorkerCommand:
        """Fork workers. Return in each of them what it is to run; the parent itself does not return."""
        while self._workers or not self._retired:
            ready = self._selector.select(None if self._workers else IDLE_SECONDS)
            if not ready:
                self._retire()
            for key, _ in ready:
                worker: WorkerCommand | None = key.data()
                if worker is not None:
                    return worker
        sys.exit()

    def _end(self) -> NoReturn:
        """End with the raylet, and end its agents: if the head node ended too, they try to reach it for a minute."""
        for agent in psutil.wait_procs(self._agents, timeout=AGENTS_S)[1]:
            with contextlib.suppress(psutil.Error):
                agent.kill()
        sys.exit()

    def _retire(self) -> None:
        """Accept no more requests. The next one starts another parent."""
        self._retired = True
        self._selector.unregister(self._listener)
        self._listener.close()
        os.unlink(self._path)

    def _accept(self) -> WorkerCommand | None:
        connection, _ = self._listener.accept()
        connection.settimeout(10.0)
        try:
            worker = _receive(connection)
            if self._times() != self._loaded_at:  # a library was replaced: new workers must load the new one
                self._retire()
                raise ValueError("a library has changed")
            pid = os.fork()
        except (OSError, ValueError):  # the other side starts its worker by itself
            connection.close()
            return None
        if pid == 0:
            self._close(connection)
            return worker
        for descriptor in worker.streams:
            os.close(descriptor)
        self._watch(connection, pid)
        return None

    def _watch(self, connection: socket.socket, pid: int) -> None:
        """Report the exit status of a worker; end the worker if the process that asked for it ends."""
        process = os.pidfd_open(pid)
        self._workers.add(pid)

        def ended() -> None:
            self._selector.unregister(process)
            os.close(process)
            with contextlib.suppress(OSError):  # what it has forked would keep its connections, and its memory
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            self._workers.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):  # the folder of the Ray session may be gone
                exits.record(self._exits, pid, code)
            with contextlib.suppress(OSError):
                connection.send(str(code).encode())
            self._forget(connection)

        def left() -> None:
            self._forget(connection)
            if pid in self._workers:
                os.kill(pid, signal.SIGKILL)

        self._selector.register(process, selectors.EVENT_READ, ended)
        self._selector.register(connection, selectors.EVENT_READ, left)
        with contextlib.suppress(OSError):
            connection.send(b"+")

    def _forget(self, connection: socket.socket) -> None:
        if connection.fileno() >= 0:
            self._selector.unregister(connection)
            connection.close()

    def _close(self, connection: socket.socket) -> None:
        """Close, in a worker, what belongs to the parent."""
        connection.close()
        os.close(self._folder)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _times(self) -> list[int]:
        return [os.stat(file).st_mtime_ns for file in self._loaded]


def run() -> None:
    """Import the libraries and fork workers; run the worker in each fork. Ends with the raylet."""
    folder, key, raylet = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    os.set_inheritable(folder, False)
    try:
        parent = Parent(folder, key, raylet)
    except (OSError, ImportError, RuntimeError) as error:
        with open(f"{folder_path(folder)}/{key}.unsafe", "w") as note:  # read by ``client.connect``
            note.write(str(error))
        raise
    worker = parent.serve()
    exits.set_record_of_this_process(parent.exits)
    os.setpgid(0, 0)  # Ray ends the process group of a worker with it
    os.chdir(worker.folder)
    os.environ.clear()
    os.environ.update(worker.environment)
    for number, descriptor in enumerate(worker.streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = list(worker.command)
    sys.path.insert(0, os.path.dirname(worker.command[0]))  # as in a process that Python starts with this script
    _imported("numpy").random.seed()  # else all forks would draw the same numbers
    _imported("torch").default_generator.seed()
    runpy.run_path(worker.command[0], run_name="__main__")


def _receive(connection: socket.socket) -> WorkerCommand:
    size, ancillary, *_ = connection.recvmsg(8, socket.CMSG_SPACE(3 * 4))
    streams = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            streams.frombytes(data)
    if len(size) < 8 or len(streams) != 3:
        raise ValueError("not a request")
    with connection.makefile("rb") as content:
        command, environment, folder = json.loads(content.read(int.from_bytes(size, "big")))
    return WorkerCommand(command, environment, folder, streams.tolist())


def _check_that_forks_are_safe() -> None:
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        raise RuntimeError(f"not safe to fork: threads {threads} run after the imports")
    if _imported("torch").cuda.is_initialized():
        raise RuntimeError("not safe to fork: the imports have initialized CUDA")


def import_warm(imports: str) -> None:
    """Import modules for processes without GPUs; raise ImportError if one has another file here than the driver's.

    Args:
        imports: see ``client.WARM_IMPORTS``.
    """
    if imports:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as in these processes
    for name, _, file in (entry.partition(":") for entry in imports.split(",") if entry):
        path = _imported(name).__file__
        if os.path.realpath(path) != os.path.realpath(file):
            raise ImportError(f"{name} is {path} here, and {file} in the driver")


def _imported(name: str) -> Any:
    return importlib.import_module(name)
