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
from collections.abc import Sequence

PARENT = "import sys; del sys.path[0]; from mcontroller.ray.warm_start.parent import run; run()"

OF_A_PROCESS = {"PWD", "OLDPWD", "SHLVL", "_"}
"""Variables that differ between the workers of a job, and that no library reads when it is loaded."""


WARM_IMPORTS = "MCONTROLLER_WARM_IMPORTS"
"""The variable with the modules that a parent imports beside its libraries: ``name:file``, divided by commas."""


DEFAULT_THREADS = "MCONTROLLER_DEFAULT_THREADS"
"""``mcontroller.ray.threads.DEFAULT_MARK``."""


ANSWER_SECONDS = 30.0
"""Time in which a parent forks, also for many workers at once; then the worker starts by itself."""


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
    folder, key = open_folder(command), environment_key()
    connection = connect(folder, key) or start_parent(folder, key)
    connection.settimeout(ANSWER_SECONDS)
    body = json.dumps([list(command), dict(os.environ), os.getcwd()]).encode()
    streams = array.array("i", [0, 1, 2])
    connection.sendmsg([len(body).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    connection.sendall(body)
    if connection.recv(1) != b"+":
        raise NoParent("the parent does not fork")
    connection.settimeout(None)  # until the worker has ended
    return connection


def open_folder(command: Sequence[str]) -> int:
    """Return a descriptor of the folder of this user's parents in the folder of the Ray session.

    Only the user can enter it. But anyone may write into the folder of the session, and so replace it at any time: from
    here on its path is ``folder_path`` of the descriptor, so that what is used is what was checked.

    Raises:
        NoParent: the folder is another user's, or others may enter it.
        OSError: it is no folder, but a link for example.
    """
    values = dict(option.split("=", 1) for option in command if option.startswith("--") and "=" in option)
    if "--temp-dir" not in values or "--session-name" not in values:
        raise NoParent("Ray has not named its session")
    folder = os.path.join(values["--temp-dir"], values["--session-name"], f"warm_start_{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        os.close(descriptor)
        raise NoParent("another user can enter the folder of the parents")
    return descriptor


def folder_path(folder: int) -> str:
    """Return a path of an open folder in this process, which is short: a socket has one of at most 107 characters."""
    return f"/proc/self/fd/{folder}"


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


def connect(folder: int, key: str) -> socket.socket | None:
    """Return a connection to the parent; None if it does not run.

    Raises:
        NoParent: a parent has found that it is not safe to fork.
    """
    if os.path.exists(f"{folder_path(folder)}/{key}.unsafe"):
        raise NoParent("the parent is not safe to fork")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"{folder_path(folder)}/{key}.sock")
    except OSError:
        connection.close()
        return None
    return connection


def start_parent(folder: int, key: str) -> socket.socket:
    """Start the parent, unless another process is starting it, and connect to it when it is ready."""
    with open(f"{folder_path(folder)}/{key}.lock", "w") as lock, open(f"{folder_path(folder)}/{key}.log", "a") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = connect(folder, key)
        if connection is not None:
            return connection
        command = [sys.executable, "-c", PARENT, str(folder), key, os.environ["RAY_RAYLET_PID"]]
        parent = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=[folder]
        )
        while parent.poll() is None:
            connection = connect(folder, key)
            if connection is not None:
                return connection
            time.sleep(0.01)
    raise NoParent("the parent does not start")


if __name__ == "__main__":
    start_worker(sys.argv[1], sys.argv[2:])
