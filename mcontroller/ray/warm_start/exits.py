"""How forked workers have ended: their parent records it, because only a parent learns the exit status."""

from __future__ import annotations

import os
import signal

_record: str | None = None


def path_of(folder: str, key: str) -> str:
    """Return the file of a parent with this key in this folder."""
    return os.path.join(folder, f"{key}.exits")


def set_record_of_this_process(path: str) -> None:
    """Set, in a forked worker, the file in which its parent records its end."""
    global _record
    _record = path


def record_of_this_process() -> str | None:
    """Return the file in which the end of this process is recorded; None if it was not forked by a warm parent."""
    return _record


def record(path: str, pid: int, status: int) -> None:
    """Add the exit code of a worker, or the negative number of the signal that ended it, to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{pid} {status}\n".encode())
    finally:
        os.close(descriptor)


def status_in(path: str, pid: int) -> int | None:
    """Return the status that was last recorded for a process; None if there is none.

    Anyone may write into the folder of the Ray session, and replace the one that has the file: one of another user
    counts as none.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor) as lines:
        if os.fstat(descriptor).st_uid != os.getuid():
            return None
        records = [line.split() for line in lines if line.startswith(f"{pid} ")]
    return int(records[-1][1]) if records else None


def described(status: int) -> str:
    """Return a status as text."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    memory = ", which the kernel sends too if memory runs out" if -status == signal.SIGKILL else ""
    return f"killed by {name}{memory}"
