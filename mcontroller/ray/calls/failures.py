"""Failures of ranks: turn Ray's exceptions into this project's errors, and find the first cause among them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from mcontroller.errors import GroupError, WorkerDied, WorkerError
from mcontroller.ray.node_processes import on_node, recorded_status
from mcontroller.ray.process import ProcessInfo
from mcontroller.ray.process_handles import ProcessEnded
from mcontroller.ray.rank_logs import without_import_warnings
from mcontroller.ray.warm_start import exits

NO_CALL = "no call"
"""In place of a method's name, for a rank that had no call."""

LOG_LINES = 20
LOG_BYTES = 16 * 1024
"""Bytes at the end of a log that are read and shown: a process may have written very much, or very long lines."""

FULL_BYTES = 1 << 20
"""A file system with less free space is full: processes cannot write their logs, or start."""

_CONNECTION_ERROR = "connection error code"
"""In Ray's text for a process that has ended by itself, whatever the reason."""

_MEMORY_MONITOR = "running low on memory"
"""In Ray's text for a process that its memory monitor has killed; advice for all nodes follows."""

FOLLOWERS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "communicator was aborted",
)
"""Texts of errors of a rank that has lost a peer: consequences of another rank's failure, not causes."""


@dataclass(frozen=True, slots=True)
class RankLabel:
    """A rank as error messages name it.

    Attributes:
        role: the role that was called.
        rank: the rank in the group.
        coordinates: its index on each axis; empty if unknown.
        info: the process that it runs in; None if that has not reported yet.
        node: the address of its node, if the process has not reported yet.
    """

    role: str
    rank: int
    coordinates: Mapping[str, int]
    info: ProcessInfo | None
    node: str | None = None

    def __str__(self) -> str:
        axes = " ".join(f"{axis}={index}" for axis, index in self.coordinates.items())
        place = f" on {self.node}" if self.node else ""
        process = f" on {self.info.node}, pid {self.info.pid}" if self.info else place
        return f"{self.role} rank {self.rank}" + (f" ({axes})" if axes else "") + process


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The failure of one rank in one method.

    Attributes:
        label: the rank.
        method: name of the method.
        error: the error that the process sent, or the exception that reports its death, Ray's or ``ProcessEnded``.
        call: the call that failed, compared by identity.
    """

    label: RankLabel
    method: str
    error: BaseException
    call: Any = None

    @property
    def upstream(self) -> bool:
        """Whether another process, usually of another group, failed to produce an argument of the call."""
        return self.cause is not None and not self._is_own(self.cause)

    def _is_own(self, cause: GroupError) -> bool:
        fields, info = cause.fields, self.label.info
        same = info is None or (fields.get("node"), fields.get("pid")) == (info.node, info.pid)
        return same and fields.get("role") == self.label.role

    @property
    def cause(self) -> GroupError | None:
        """The error of this project that the worker process raised; None if the process ended instead."""
        return self.error if isinstance(self.error, GroupError) else None

    @property
    def died(self) -> bool:
        """Whether the process ended, also by Ray's memory monitor."""
        return isinstance(self.error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError | ProcessEnded)

    @property
    def follows(self) -> bool:
        """Whether the rank failed because it lost a peer."""
        return isinstance(self.cause, WorkerError) and is_follower(self.cause.cause)

    @property
    def at(self) -> float:
        """Seconds since the epoch, by the clock of the failed rank; infinity for a process that died."""
        return getattr(self.cause, "failed_at", float("inf"))


def is_follower(cause: str) -> bool:
    """Return whether the text of a worker's exception reports the loss of a peer."""
    return any(sign in cause.lower() for sign in FOLLOWERS)


def first_cause(failures: Sequence[RankFailure]) -> GroupError:
    """Return the error to raise for these failures: the earliest cause, with the number of other ranks that failed.

    Failures after the loss of a peer come last; failures of other processes come after the failures of the group.
    """
    first = min(failures, key=lambda failure: (failure.follows, failure.upstream, failure.at, failure.label.rank))
    followers = len(failures) - 1
    if first.died:
        return _died(first, followers)
    if isinstance(first.cause, WorkerError) and not first.upstream:
        return _raised(first.cause, first.label, followers)
    if first.cause is not None:
        return first.cause
    return _unexpected(first, followers)


def _raised(error: WorkerError, label: RankLabel, followers: int) -> WorkerError:
    label = label if label.coordinates else replace(label, coordinates=error.coordinates)  # the worker's own report
    message = f"{label} failed in {error.method}: {error.cause}{_counted(followers)}\n{error.worker_traceback}"
    known = {"coordinates": dict(label.coordinates), "followers": followers}
    return WorkerError(message, **{**error.fields, **known})


def _unexpected(failure: RankFailure, followers: int) -> WorkerError:
    """Return the error for an exception outside the worker's method: arguments or a value that could not be sent."""
    text = f"{type(failure.error).__name__}: {failure.error}"
    return WorkerError(
        f"{failure.label} failed in {failure.method}: {text}{_counted(followers)}",
        **_rank_fields(failure),
        cause=text,
        worker_traceback=text,
        followers=followers,
    )


def _died(failure: RankFailure, followers: int) -> WorkerDied:
    info = failure.label.info
    if isinstance(failure.error, ProcessEnded) and failure.error.node_gone:
        exit_cause, log_tail = str(failure.error), "(not available)"
    else:
        exit_cause, log_tail = _exit_cause(str(failure.error), info), tail(info)
    when = "between calls" if failure.method == NO_CALL else f"in {failure.method}"
    return WorkerDied(
        f"{failure.label} died {when}: {exit_cause}{_counted(followers)}\nlast lines of its log:\n{log_tail}",
        **_rank_fields(failure),
        exit_cause=exit_cause,
        log_tail=log_tail,
        followers=followers,
    )


def _rank_fields(failure: RankFailure) -> dict[str, Any]:
    info = failure.label.info
    return {
        "role": failure.label.role,
        "rank": failure.label.rank,
        "coordinates": dict(failure.label.coordinates),
        "node": info.node if info else failure.label.node,
        "pid": info.pid if info else None,
        "method": failure.method,
    }


def _counted(followers: int) -> str:
    return f" ({followers} other rank{'s' * (followers > 1)} failed after it)" if followers else ""


def _exit_cause(text: str, info: ProcessInfo | None) -> str:
    """Return how a process has ended, and Ray's description of its death, if that has more than a lost connection."""
    known = None
    if info is not None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # its node is gone
            known = on_node(info.node_id, recorded_status, info.process)
    by_ray = _ray_cause(text)
    if known is None:
        return f"{by_ray} (its exit status is unknown, because no warm parent has forked it, or its node is gone)"
    by_ray = "" if _CONNECTION_ERROR in by_ray else f"; {by_ray}"
    return exits.described(known) + by_ray


def _ray_cause(text: str) -> str:
    """Return Ray's description of the death without its headers and its list of general advice."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    signs = ("The actor is dead because", "Worker exit", _MEMORY_MONITOR)
    causes = [line for line in lines if any(sign in line for sign in signs)]
    return " ".join(causes or lines[-1:]).split(" Some common causes include")[0]


def tail(info: ProcessInfo | None) -> str:
    """Return the last lines that a process wrote, read on its node, or why they are not available."""
    if info is None or not info.log:
        session = ray._private.worker.global_worker.node.get_session_dir_path()  # type: ignore[union-attr]
        return "\n".join(["(the process ended before it reported the path of its log)", *_full_disk(session)])
    try:
        return str(on_node(info.node_id, _read_tail, info.log))
    except (ray.exceptions.RayError, TimeoutError) as error:
        return f"(the log could not be read on node {info.node}: {type(error).__name__})"


def _read_tail(paths: Sequence[str]) -> str:
    """Return the last lines of each file; standard error, which is the most informative, comes last."""
    lines: list[str] = []
    for path in paths:
        if os.path.exists(path):
            with open(path, "rb") as log:
                log.seek(max(0, os.path.getsize(path) - LOG_BYTES))
                written = without_import_warnings(log.read(LOG_BYTES).decode(errors="replace").splitlines())
            lines += [line for line in written if line and not line.startswith(":")][-LOG_LINES:]
    return "\n".join([*(lines or ["(empty)"]), *(line for path in paths[:1] for line in _full_disk(path))])


def _full_disk(path: str) -> list[str]:
    """Return a line that says so if the file system of a file of the Ray session is full: its processes then end."""
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize
    if free >= FULL_BYTES and (disk.f_favail or not disk.f_files):
        return []
    return [
        f"(the file system of {path} is full: {free} bytes and {disk.f_favail} files are left. Ray's processes end if "
        "they cannot write there: free space, or start Ray with --temp-dir on another file system)"
    ]
