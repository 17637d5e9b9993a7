"""LocalExecutor: ranks in the calling process, run one after another in its own thread."""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcontroller.errors import GroupBroken, GroupError, WorkerError
from mcontroller.local.copies import private_arguments, private_copy
from mcontroller.transport import Handle, Outcome, RankCall, finish, run_method
from mcontroller.worker import ClassWithInitArgs, RankEnvironment

__all__ = ["LocalExecutor", "LocalPending"]


class LocalHandle:
    """Holds one value in this process; a reader gets a copy of its own."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class LocalPending:
    """A call that has been run: its outcomes, or the failure that ended it."""

    def __init__(self, outcomes: Sequence[Outcome], measured: bool, failure: GroupError | None) -> None:
        self.parts = [LocalHandle(outcome.value) for outcome in outcomes]
        self.lengths = [LocalHandle(outcome.rows) for outcome in outcomes] if measured else []
        self._failure = failure

    def result(self, timeout: float | None = None, *, joined: bool = False) -> list[Any]:
        self.check()
        return [private_copy(part.value) for part in self.parts]

    def check(self, timeout: float | None = None) -> None:
        if self._failure is not None:
            raise self._failure

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        """Nothing is left to give up: the call ran when it was submitted."""


class LocalExecutor:
    """The ranks of one role as objects of this process.

    A call runs when it is submitted, rank after rank, so that ``breakpoint()`` in a method works and nothing runs
    beside it; deadlines do not apply. The first exception ends the call and breaks the group, as over Ray.
    ``place`` may be called before or after; ``workers`` are the objects by rank.
    """

    transport = "local"

    def __init__(self, cls_with_init: ClassWithInitArgs[Any], world_size: int, role: str) -> None:
        self.role = role
        self.world_size = world_size
        self.nodes: Sequence[str] = (socket.gethostname(),) * world_size
        self.coordinates: Sequence[Mapping[str, int]] = ()
        self._broken: GroupError | None = None
        self._closed = False
        self.workers: list[Any] = []
        for rank in range(world_size):
            self.workers.append(self._construct(rank, cls_with_init))

    def _construct(self, rank: int, cls_with_init: ClassWithInitArgs[Any]) -> Any:
        args, kwargs = private_copy(cls_with_init.args), private_copy(cls_with_init.kwargs)
        try:
            with self.standing(rank):
                return cls_with_init.cls(*args, **kwargs)
        except Exception as error:
            raise self._failure(rank, "__init__", error) from error

    @contextlib.contextmanager
    def standing(self, rank: int) -> Iterator[None]:
        """While the block runs, this process's environment is that of the rank."""
        variables = RankEnvironment(rank, self.world_size, rank, self.world_size).variables()
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def set_coordinates(self, coordinates: Sequence[Mapping[str, int]]) -> None:
        self.coordinates = coordinates

    def share(self, value: Any, readers: int) -> Any:
        return value

    def submit(
        self, method: str, calls: Sequence[RankCall], *, timeout: float | None = None, measure: bool = False
    ) -> LocalPending:
        self._check_alive(method)
        outcomes = []
        for call in calls:
            try:
                outcome = self.run(call, method, measure)
            except Exception as error:
                self._broken = error if isinstance(error, GroupError) else self._failure(call.rank, method, error)
                return LocalPending((), measure, self._broken)
            if call.ship:
                outcomes.append(outcome)
        return LocalPending(outcomes, measure, None)

    def run(self, call: RankCall, method: str, measure: bool) -> Outcome:
        """One rank's part in a call."""
        arguments = private_arguments(call.arguments)
        with self.standing(call.rank):
            return run_method(
                self.workers[call.rank], method, arguments, fetch=self.fetch, ship=call.ship, measure=measure
            )

    def fetch(self, handles: Sequence[Handle]) -> list[Any]:
        return [private_copy(handle.value) for handle in handles]

    def shutdown(self) -> None:
        workers = [] if self._broken is not None else self.workers
        self._closed = True
        self.workers = []
        for rank, worker in enumerate(workers):
            try:
                with self.standing(rank):
                    finish(worker)
            except Exception as error:
                raise self._failure(rank, "before_shutdown", error) from error

    def _check_alive(self, method: str) -> None:
        if self._closed:
            raise GroupBroken(f"{self.role}.{method}: the group was shut down", role=self.role, first_cause=None)
        if self._broken is not None:
            raise GroupBroken(
                f"{self.role}.{method}: the group is broken since {_first_line(self._broken)}; make a new group",
                role=self.role,
                first_cause=self._broken,
            )

    def _failure(self, rank: int, method: str, error: Exception) -> WorkerError:
        coordinates = dict(self.coordinates[rank]) if self.coordinates else {}
        axes = " ".join(f"{axis}={index}" for axis, index in coordinates.items())
        where = f"{self.role} rank {rank}{f' ({axes})' if axes else ''}"
        failure = WorkerError(
            f"{where} failed in {method}: {type(error).__name__}: {error}",
            role=self.role,
            rank=rank,
            coordinates=coordinates,
            node=self.nodes[rank],
            pid=os.getpid(),
            method=method,
            cause=f"{type(error).__name__}: {error}",
            worker_traceback="".join(traceback.format_exception(error)),
            followers=0,
        )
        failure.__cause__ = error
        return failure


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
