"""Files that are replaced as a whole: a reader finds the old content or the new one, after a crash too. And locks.

A lock is a file with the name of its holder, and a lock of the kernel on it (``flock``), which ends with the process.
A lock of ``lockf`` would end when its process closes the file after any other use, such as reading who has the lock.
Network file systems that have such locks enforce them between nodes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mcontroller.errors import ConfigError, DataError
from mcontroller.machine import machine_id

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""The errors of file systems that have no locks."""

_held: dict[Path, int] = {}
"""The descriptors of the locks that this process holds, by path."""
_logger = logging.getLogger(__name__)


def _close_inherited() -> None:
    """Close the locks of the parent in a forked process, which would hold them longer than the parent."""
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_close_inherited)


def partial_path(target: Path) -> Path:
    """Return the file or directory beside ``target`` in which it is written before it is renamed to ``target``."""
    return target.with_name(f".{target.name}.partial")


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file, in hexadecimal: the one that ``sha256sum`` prints.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_new_directory(path: str | os.PathLike[str]) -> None:
    """Raise DataError if there is something at a path that is not an empty directory."""
    target = Path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(f"{str(path)!r} exists already and is not empty: choose another directory", path=str(path))


def start_directory(target: Path, lock: Path, what: str) -> None:
    """Create an empty directory at ``partial_path(target)``, and lock a file.

    Args:
        target: what the directory is renamed to when it is complete.
        lock: the file, see ``acquire_lock``.
        what: what it protects.

    Raises:
        DataError: another process holds the lock, or the directory cannot be created.
    """
    try:
        acquire_lock(lock, what)
        shutil.rmtree(partial_path(target), ignore_errors=True)
        partial_path(target).mkdir()
    except OSError as error:
        discard_directory(target, lock)
        raise DataError(f"cannot write to {str(target)!r}: {error}", path=str(target)) from error


def discard_directory(target: Path, lock: Path) -> None:
    """Delete what was written to a directory that is not complete, and release its lock."""
    shutil.rmtree(partial_path(target), ignore_errors=True)
    release_lock(lock)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file next to ``path``; after the block, flush it to the disk and rename it to ``path``.

    If the block raises, ``path`` has its old content, and nothing is left of the new one.
    """
    # Several threads, also of several nodes, may write it at the same time: the last one wins.
    partial = partial_path(path.with_name(f"{path.name}.{uuid.uuid4().hex}"))
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file, see ``replacing``.

    Raises:
        OSError: it cannot be written; ``path`` has its old content.
    """
    with replacing(path) as file:
        file.write(text.encode())


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_space(path: Path) -> str:
    """Return the disk of a path and its free bytes, for messages about what cannot be written there."""
    path = path.absolute()
    while not os.path.ismount(path):
        path = path.parent
    disk = os.statvfs(path)
    return f"the disk at {path} has {disk.f_bavail * disk.f_frsize:,} bytes free"


def check_writable(directory: Path, key: str) -> None:
    """Check that files can be created in a directory, or that it can be created.

    Args:
        directory: the directory, which need not exist.
        key: the configuration key whose value it is, for error messages.

    Raises:
        ConfigError: they cannot; the message has the directory that prevents it.
    """
    existing = directory
    while not existing.exists():
        existing = existing.parent
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return
    reason = "cannot be written" if existing.is_dir() else "is not a directory"
    raise ConfigError(f"{key} is {directory}, and {existing} {reason}: set another one", key=key, value=str(directory))


def moved_path(path: str | os.PathLike[str], before: str | os.PathLike[str], now: Path) -> Path:
    """Return where a recorded path is, after the directory ``before`` has become ``now``; a path outside of it stays.

    Args:
        path: absolute, or relative to the directory.
        before: the absolute path of the directory when ``path`` was recorded.
        now: its path now.
    """
    whole, root = (Path(os.path.normpath(Path(before, part))) for part in (path, "."))
    return now / whole.relative_to(root) if whole.is_relative_to(root) else whole


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file has the few lines that stand for a file of Git LFS that was not downloaded."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(64).startswith(b"version https://git-lfs.github.com/spec/")


def delete_obsolete(directory: Path) -> None:
    """Delete a directory, and first the links next to it that name it; nothing if it does not exist.

    If that fails, log a warning: what replaces the directory is complete without it.
    """
    try:
        if directory.parent.is_dir():
            for link in directory.parent.iterdir():
                if link.is_symlink() and os.readlink(link) == directory.name:
                    link.unlink()
        delete_directory(directory)
    except OSError as error:
        _logger.warning("%s is not needed any more, and cannot be deleted: %s", directory, error)


def delete_directory(directory: Path) -> None:
    """Delete a directory, or the link to it if it has been moved to another disk; nothing if it does not exist.

    Raises:
        OSError: it cannot be deleted.
    """
    if directory.is_symlink():
        directory.unlink()
    elif directory.exists():
        shutil.rmtree(directory)


def acquire_lock(path: Path, what: str) -> None:
    """Lock something for this process, until ``release_lock`` or the end of the process; no more if it has the lock.

    The lock of a process that has ended is free. On a file system without locks, a warning is logged.

    Args:
        path: the file of the lock. Its directory is created.
        what: what it protects, for messages, such as ``the run in /runs/first``.

    Raises:
        DataError: another process holds the lock; fields: ``path``, ``host``, ``machine``, ``pid``, ``since``.
        OSError: the file cannot be written.
    """
    path = _lock_path(path)
    if path in _held:
        return
    with contextlib.suppress(FileExistsError):  # a file: opening the lock says so
        path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, path, what)
            if path.exists() and os.path.samestat(os.stat(path), os.fstat(descriptor)):
                break  # else its holder has just deleted it
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    _held[path] = descriptor


def release_lock(path: Path) -> None:
    """Release a lock; nothing if this process does not have it."""
    path = _lock_path(path)
    descriptor = _held.pop(path, None)
    if descriptor is not None:
        os.ftruncate(descriptor, 0)  # for a process that has opened the file already
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock_path(path: Path) -> Path:
    """Return a path that is the same for every way to write the directory of a lock."""
    return Path(os.path.realpath(path.parent), path.name)


def _lock(descriptor: int, path: Path, what: str) -> None:
    """Lock an open file for this process, or raise DataError; then write the name of this process into it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = _read_holder(descriptor)
            by = "process {pid} on {host} since {since}".format_map(holder) if holder else "another process"
            text = f"{what} is in use by {by}: wait for its end, or use another directory"
            raise DataError(text, path=str(path), **holder) from None
        if error.errno not in _WITHOUT_LOCKS:
            raise
        _logger.warning("%s is not protected from a second process: the file system of %s has no locks", what, path)
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    holder = {"host": socket.gethostname(), "machine": machine_id(), "pid": os.getpid(), "since": since}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    os.fsync(descriptor)


def _read_holder(descriptor: int) -> dict[str, Any]:
    """Return what the holder of a lock has written; nothing if it has not done so yet."""
    content = os.pread(descriptor, 10_000, 0)
    return dict(json.loads(content)) if content else {}
