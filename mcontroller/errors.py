"""The errors of the controller, each with its fields; those of ``parallel_state`` are exported here too.

``MControllerError`` is the root of all.
"""

from __future__ import annotations

from parallel_state.errors import LayoutError, MControllerError, MissingPackageError, ParallelStateError, TopologyError

__all__ = [
    "CallTimeout",
    "ConfigError",
    "DataError",
    "DispatchError",
    "GroupBroken",
    "GroupError",
    "LayoutError",
    "MControllerError",
    "MissingPackageError",
    "ParallelStateError",
    "ResourceError",
    "TopologyError",
    "WorkerDied",
    "WorkerError",
]


class ConfigError(MControllerError, ValueError):
    """A configuration key that does not exist, or a value that does not fit; fields: ``key``, ``value``."""


class DataError(MControllerError, ValueError):
    """A batch that does not hold what is asked of it; fields name the columns, the lengths or the keys."""


class DispatchError(MControllerError, ValueError):
    """Arguments that do not fit a method's dispatch mode; raised before anything is sent."""


class ResourceError(MControllerError):
    """Resources that the cluster or a pool cannot give; fields: what was asked, what exists, what is taken."""


class GroupError(MControllerError):
    """Root of what can go wrong while a group's method runs."""


class WorkerError(GroupError):
    """An exception raised by a worker's method.

    Fields: ``role``, ``rank``, ``coordinates`` (axis -> index), ``node``, ``pid``, ``method``, ``cause`` (the type
    and text of the worker's exception), ``worker_traceback`` (its own traceback as text), ``followers`` (how many
    other ranks failed after it).
    """

    role: str
    rank: int
    coordinates: dict[str, int]
    node: str
    pid: int
    method: str
    cause: str
    worker_traceback: str
    followers: int


class WorkerDied(GroupError):
    """A worker process that ended; fields as in ``WorkerError``, with ``exit_cause`` and ``log_tail``."""

    role: str
    rank: int
    exit_cause: str
    log_tail: str


class CallTimeout(GroupError, TimeoutError):
    """A call past its deadline; fields: ``role``, ``method``, ``timeout`` in seconds, ``ranks``, ``stacks`` by rank."""

    role: str
    method: str
    timeout: float
    ranks: tuple[int, ...]
    stacks: dict[int, str]


class GroupBroken(GroupError):
    """A call to a group that an earlier failure has broken; ``first_cause`` is that failure."""

    role: str
    first_cause: BaseException
