"""The errors of the controller, each with its fields; also exports the errors of ``parallel_state``.

``MControllerError`` is the root of all. The fields of an error are its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from parallel_state.errors import (
    BrokenPackageError,
    LayoutError,
    MControllerError,
    MissingPackageError,
    ParallelStateError,
    TopologyError,
)

__all__ = [
    "BrokenPackageError",
    "CallRejected",
    "CallTimeout",
    "ConfigError",
    "ConnectionLost",
    "DataError",
    "DispatchError",
    "GroupBroken",
    "GroupError",
    "LayoutError",
    "MControllerError",
    "MissingPackageError",
    "ParallelStateError",
    "ResourceError",
    "ShutdownError",
    "TopologyError",
    "WorkerDied",
    "WorkerError",
    "before_changes",
    "close_all",
    "is_before_changes",
]

_BEFORE_CHANGES = "raised_before_changes"


class ConfigError(MControllerError, ValueError):
    """An unknown configuration key, or a value that is not allowed; fields: ``key``, ``value``."""


class DataError(MControllerError, ValueError):
    """A batch without the expected columns, rows or keys; the fields name them."""


class ShutdownError(MControllerError):
    """Several parts of a program could not be ended as they should.

    Attributes:
        errors: the error of each part, by its name.
    """

    errors: dict[str, Exception]


class DispatchError(MControllerError, ValueError):
    """Arguments, options or results that do not fit a method's dispatch mode.

    Errors in arguments and options are raised before anything is sent, and the group stays usable.
    """


class ResourceError(MControllerError):
    """A request for more resources than the cluster or a pool has; the fields count them."""


class GroupError(MControllerError):
    """Root of the errors of a running call."""


class WorkerError(GroupError):
    """An exception raised by a worker's method.

    Attributes:
        role: the name of the group.
        rank: the rank that raised first.
        coordinates: its index on each axis.
        node: the name of its node.
        pid: the id of its process.
        method: the method that was called.
        cause: the type and text of the worker's exception.
        worker_traceback: the worker's own traceback, as text.
        followers: the number of other ranks that failed after it.
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


class CallRejected(WorkerError):
    """A call that every rank rejected before it changed anything: the group is usable, as if it had not been called.

    See ``before_changes``.
    """


class WorkerDied(GroupError):
    """A worker process that ended; it has the fields of ``WorkerError`` that are known, and two more.

    Attributes:
        role: the name of the group.
        rank: the rank whose process ended.
        exit_cause: the reason, such as a signal.
        log_tail: the last lines of the process's log.
    """

    role: str
    rank: int
    exit_cause: str
    log_tail: str


class CallTimeout(GroupError, TimeoutError):
    """A call that did not finish before its deadline.

    Attributes:
        role: the name of the group.
        method: the method that was called.
        timeout: the deadline in seconds.
        ranks: the ranks that have not answered.
        stacks: the Python stacks of these ranks, as text, by rank.
        cause: which rank waits for which, such as ``rank 1 (tp=1) has ended, and rank 0 waits for it``; if no rank
            waits in a collective, where the first of them is; empty if no record was kept.
        report: for the ranks that wait, the collective, its group, the line of the program and the missing ranks.
    """

    role: str
    method: str
    timeout: float
    ranks: tuple[int, ...]
    stacks: dict[int, str]
    cause: str
    report: str


class ConnectionLost(GroupError):
    """The connection to a worker process was lost and could not be restored, although Ray reports it alive.

    Attributes:
        role: the name of the group.
        rank: the rank of the process.
        node: the address of its node.
        pid: the id of the process.
        method: the method that was called.
    """

    role: str
    rank: int
    node: str
    pid: int
    method: str


class GroupBroken(GroupError):
    """A call to a group that an earlier failure has broken.

    Attributes:
        role: the name of the group.
        first_cause: that failure.
    """

    role: str
    first_cause: BaseException


def before_changes() -> AbstractContextManager[None]:
    """Mark errors that are raised in the block, in a worker's method, as raised before the method has changed anything.

    If every rank of a call raises such an error, the caller gets ``CallRejected`` and the group stays usable. If only
    some do, the ranks disagree, and the call breaks its group as any other error does. The block may contain
    collectives; after it has raised, the rank must not have one that others wait for:

        @register(Dispatch.MEGATRON_COMPUTE_PROTO)
        def update(self, batch):
            with before_changes():
                check_columns(batch)
            ...
    """
    return _BeforeChanges()


class _BeforeChanges(AbstractContextManager[None]):
    """A class, because every call has such a block: this takes 0.2 us, a generator 1.0."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            setattr(error, _BEFORE_CHANGES, True)


def is_before_changes(error: BaseException) -> bool:
    """Return whether an error left a block of ``before_changes``."""
    return getattr(error, _BEFORE_CHANGES, False)


def close_all(what: str, closings: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Call every function, and raise the errors of all of them together.

    Args:
        what: what is ended, for the message.
        closings: the name of each part, and the function that ends it.

    Raises:
        ShutdownError: several functions raised. The error of only one is raised as it is.
    """
    errors: dict[str, Exception] = {}
    for name, close in closings:
        try:
            close()
        except Exception as error:
            errors[name] = error
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        lines = (f"{name}: {type(error).__name__}: {error}" for name, error in errors.items())
        text = f"{len(errors)} parts of {what} could not be ended as they should; all others have ended:\n"
        raise ShutdownError(text + "\n".join(lines), errors=errors) from next(iter(errors.values()))
