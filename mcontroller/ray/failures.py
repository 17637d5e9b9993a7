"""What went wrong on which rank: Ray's exceptions made into the controller's errors, and the first cause among them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcontroller.errors import GroupError, WorkerDied, WorkerError
from mcontroller.ray.host import HostInfo

__all__ = ["Failure", "Place", "first_cause", "is_follower", "tail"]

LOG_LINES = 20
LOG_BYTES = 16 * 1024
"""How much of the end of a log is read, and told: a process may have written without end, or without line ends."""

LOG_SECONDS = 15.0
"""How long a log on another node is waited for: it is read by a process that Ray may have to start there."""

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
"""What a rank says whose peer has gone: the consequence of another rank's failure, not a cause."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: its role, rank and coordinates, and the process it runs in (None while that is unknown)."""

    role: str
    rank: int
    coordinates: Mapping[str, int]
    info: HostInfo | None

    def __str__(self) -> str:
        axes = " ".join(f"{axis}={index}" for axis, index in self.coordinates.items())
        process = f" on {self.info.node}, pid {self.info.pid}" if self.info else ""
        return f"{self.role} rank {self.rank}" + (f" ({axes})" if axes else "") + process


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's failure in one method, as Ray raised it."""

    place: Place
    method: str
    error: BaseException
    flight: Any = None  # the call it belongs to, compared by identity

    @property
    def upstream(self) -> bool:
        """Whether another process, mostly of another group, failed to make an argument of the call."""
        return self.cause is not None and not self._is_own(self.cause)

    def _is_own(self, cause: GroupError) -> bool:
        fields, info = cause.fields, self.place.info
        here = info is None or (fields.get("node"), fields.get("pid")) == (info.node, info.pid)
        return here and fields.get("role") == self.place.role

    @property
    def cause(self) -> GroupError | None:
        """The structured error that the host raised; None where the process ended instead."""
        cause = getattr(self.error, "cause", None)
        return cause if isinstance(cause, GroupError) else None

    @property
    def died(self) -> bool:
        return isinstance(self.error, ray.exceptions.RayActorError)

    @property
    def follows(self) -> bool:
        return isinstance(self.cause, WorkerError) and is_follower(self.cause.cause)

    @property
    def at(self) -> float:
        """Seconds since the epoch, by the clock of the failed rank; a process that died could not say."""
        return getattr(self.cause, "failed_at", float("inf"))


def is_follower(cause: str) -> bool:
    """Whether a worker's exception tells of a lost peer."""
    return any(sign in cause.lower() for sign in FOLLOWERS)


def first_cause(failures: Sequence[Failure]) -> GroupError:
    """The error to raise for these failures: causes before followers, the earliest first, the others counted.

    What another process failed in comes after what the group itself did.
    """
    first = min(failures, key=lambda failure: (failure.follows, failure.upstream, failure.at, failure.place.rank))
    followers = len(failures) - 1
    if first.died:
        return _died(first, followers)
    if isinstance(first.cause, WorkerError) and not first.upstream:
        return _raised(first.cause, first.place, followers)
    if first.cause is not None:
        return first.cause
    return _unexpected(first, followers)


def _raised(error: WorkerError, place: Place, followers: int) -> WorkerError:
    message = f"{place} failed in {error.method}: {error.cause}{_counted(followers)}\n{error.worker_traceback}"
    known = {"coordinates": dict(place.coordinates), "followers": followers}
    return WorkerError(message, **{**error.fields, **known})


def _unexpected(failure: Failure, followers: int) -> WorkerError:
    """An exception outside the worker's method: arguments or a value that could not be carried."""
    text = f"{type(failure.error).__name__}: {failure.error}"
    return WorkerError(
        f"{failure.place} failed in {failure.method}: {text}{_counted(followers)}",
        **_where(failure),
        cause=text,
        worker_traceback=text,
        followers=followers,
    )


def _died(failure: Failure, followers: int) -> WorkerDied:
    exit_cause = _exit_cause(str(failure.error))
    log_tail = tail(failure.place.info)
    return WorkerDied(
        f"{failure.place} died in {failure.method}: {exit_cause}{_counted(followers)}\n"
        f"last lines of its log:\n{log_tail}",
        **_where(failure),
        exit_cause=exit_cause,
        log_tail=log_tail,
        followers=followers,
    )


def _where(failure: Failure) -> dict[str, Any]:
    info = failure.place.info
    return {
        "role": failure.place.role,
        "rank": failure.place.rank,
        "coordinates": dict(failure.place.coordinates),
        "node": info.node if info else None,
        "pid": info.pid if info else None,
        "method": failure.method,
    }


def _counted(followers: int) -> str:
    return f" ({followers} other rank{'s' * (followers > 1)} failed after it)" if followers else ""


def _exit_cause(text: str) -> str:
    """Ray's account of the death without its headers and its list of general advice."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("The actor is dead because") or "Worker exit" in line]
    return " ".join(told or lines[-1:]).split(" Some common causes include")[0]


def tail(info: HostInfo | None, timeout: float = LOG_SECONDS) -> str:
    """The last lines that a process wrote, read on its own node; says why when they cannot be had."""
    if info is None or not info.log:
        return "(the process had not said where its log is)"
    if info.node_id == ray.get_runtime_context().get_node_id():
        return _read_tail(info.log)
    there = NodeAffinitySchedulingStrategy(info.node_id, soft=False)
    ref = ray.remote(_read_tail).options(num_cpus=0, scheduling_strategy=there).remote(info.log)
    try:
        return ray.get(ref, timeout=timeout)
    except (ray.exceptions.RayError, TimeoutError) as error:
        return f"(node {info.node} did not give its log: {type(error).__name__})"


def _read_tail(paths: Sequence[str]) -> str:
    """The last lines of each file; standard error, which tells most, comes last."""
    lines: list[str] = []
    for path in paths:
        if os.path.exists(path):
            with open(path, "rb") as log:
                log.seek(max(0, os.path.getsize(path) - LOG_BYTES))
                written = log.read(LOG_BYTES).decode(errors="replace").splitlines()
            lines += [line for line in written if line and not line.startswith(":")][-LOG_LINES:]
    return "\n".join(lines) or "(empty)"
