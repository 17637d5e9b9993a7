"""Start a Ray worker as a fork of the warm parent of this node, or as usual if that is not possible.

Ray starts this file with ``python -S -P``, the number of OpenMP threads, and the command of a worker. It imports only
the standard library, because each process of a group runs it. The process exits as the worker does, and ends it if it
is ended first.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

PARENT = "import sys; del sys.path[0]; from mcontroller.ray.warm_start.parent import run; run()"

OF_A_PROCESS = {"PWD", "OLDPWD", "SHLVL", "_"}
"""Variables that differ between the workers of a job, and that no library reads when it is loaded."""


DEFAULT_THREADS = "MCONTROLLER_DEFAULT_THREADS"
"""``mcontroller.ray.threads.DEFAULT_MARK``."""


class NoParent(Exception):
    """The worker cannot be forked from a warm parent."""


def start_worker(threads: str, command: Sequence[str]) -> None:
    """Run the command of a worker, a script and its arguments; do not return."""
    if "OMP_NUM_THREADS" not in os.environ:  # as Ray does later, when a forked worker has loaded torch
        os.environ["OMP_NUM_THREADS"] = threads
        if threads == "1":
            os.environ[DEFAULT_THREADS] = "1"
    try:
        connection = request(command)
    except (OSError, NoParent):
        os.execv(sys.executable, [sys.executable, *command])
    status = int(connection.recv(16) or b"1")  # empty: the parent has ended, and the worker's status is unknown
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


def request(command: Sequence[str]) -> socket.socket:
    """Return the connection to the parent that has forked a worker; it closes it when the worker has ended.

    Raises:
        NoParent: there is no parent, or it does not fork.
    """
    folder, key = socket_folder(command), environment_key()
    connection = connect(folder, key) or start_parent(folder, key)
    body = json.dumps([list(command), dict(os.environ), os.getcwd()]).encode()
    streams = array.array("i", [0, 1, 2])
    connection.sendmsg([len(body).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    connection.sendall(body)
    if connection.recv(1) != b"+":
        raise NoParent("the parent does not fork")
    return connection


def socket_folder(command: Sequence[str]) -> str:
    """Return the folder of this user's parents in the folder of the Ray session, which only the user can enter."""
    values = dict(each.split("=", 1) for each in command if each.startswith("--") and "=" in each)
    if "--temp-dir" not in values or "--session-name" not in values:
        raise NoParent("Ray has not named its session")
    folder = os.path.join(values["--temp-dir"], values["--session-name"], f"warm_start_{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.stat(folder).st_uid != os.getuid() or os.stat(folder).st_mode & 0o077:
        raise NoParent("another user can enter the folder of the parents")
    return folder


def environment_key() -> str:
    """Return a text that is equal for processes that may be forked from one parent.

    They have the same interpreter and the same environment, because libraries read it when they are loaded, and the
    same limits, which a fork inherits.
    """
    variables = {name: value for name, value in os.environ.items() if name not in OF_A_PROCESS}
    limits = [resource.getrlimit(getattr(resource, name)) for name in sorted(dir(resource)) if "RLIMIT_" in name]
    with open("/proc/self/cgroup") as groups:
        inherited = [groups.read(), limits, sorted(os.sched_getaffinity(0)), os.nice(0)]
    text = json.dumps([sys.executable, sorted(variables.items()), inherited])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def connect(folder: str, key: str) -> socket.socket | None:
    """Return a connection to the parent; None if it does not run.

    Raises:
        NoParent: a parent has found that it is not safe to fork.
    """
    if os.path.exists(os.path.join(folder, f"{key}.unsafe")):
        raise NoParent("the parent is not safe to fork")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(folder) as short:
            connection.connect(f"{short}/{key}.sock")
    except OSError:
        connection.close()
        return None
    return connection


@contextlib.contextmanager
def short_path(folder: str) -> Iterator[str]:
    """Yield another path of a folder, because the path of a socket may have 107 characters."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def start_parent(folder: str, key: str) -> socket.socket:
    """Start the parent, unless another process is starting it, and connect to it when it is ready."""
    with open(os.path.join(folder, f"{key}.lock"), "w") as lock, open(os.path.join(folder, f"{key}.log"), "a") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = connect(folder, key)
        if connection is not None:
            return connection
        command = [sys.executable, "-c", PARENT, folder, key, os.environ["RAY_RAYLET_PID"]]
        parent = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True
        )
        while parent.poll() is None:
            connection = connect(folder, key)
            if connection is not None:
                return connection
            time.sleep(0.01)
    raise NoParent("the parent does not start")


if __name__ == "__main__":
    start_worker(sys.argv[1], sys.argv[2:])
