"""RayExecutor: sends the calls of one role to its worker processes, and receives the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from mcontroller.errors import GroupError
from mcontroller.ray.process import CallHeader, fetch
from mcontroller.ray.supervision import GroupProcesses, SentCall
from mcontroller.ray.wire import Packed, pack, unpack
from mcontroller.transport import Arguments, Deferred, Fetch

__all__ = ["RayCall", "RayExecutor", "Stored"]


class RayExecutor:
    """The ranks of ``role`` in the processes of a group; see ``mcontroller.transport.Executor``."""

    transport = "ray"

    def __init__(self, processes: GroupProcesses, role: str) -> None:
        self.processes = processes
        self.role = role

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.processes.world_size

    @property
    def nodes(self) -> Sequence[str]:
        """The address of the node of every rank."""
        return self.processes.nodes

    def set_coordinates(self, coordinates: Sequence[Mapping[str, int]]) -> None:
        """Set the coordinates of each rank, by rank, for error messages."""
        self.processes.coordinates[self.role] = coordinates

    def share(self, value: Any, readers: int) -> Any:
        """Return a ``Stored`` if several ranks read a large value, else the value."""
        if readers <= 1:
            return value
        packed = pack(value)
        return Stored(ray.put(packed)) if isinstance(packed, Packed) and packed.large else value

    def submit(
        self,
        method: str,
        arguments: Mapping[int, Arguments],
        returning: Sequence[int],
        *,
        timeout: float | None = None,
        measure: bool = False,
    ) -> RayCall:
        """Send a call to its ranks; see ``mcontroller.transport.Executor.submit``."""
        processes, expected = self.processes, frozenset(returning)
        readers: dict[int, list[int]] = {id(each): [] for each in arguments.values()}
        for rank, each in arguments.items():
            if rank in expected:
                readers[id(each)].append(rank)
        with processes.sending:
            processes.check(self.role)
            number = processes.next_call()
            messages: dict[int, Any] = {}
            for each in arguments.values():
                key = id(each)
                if key not in messages:
                    header = CallHeader(processes.caller, number, self.role, method, readers[key], measure)
                    messages[key] = pack(each)._replace(header=tuple(header)).as_argument()
            ranks = tuple(arguments)
            call = RayCall(
                processes, self.role, method, ranks, returning, timeout=timeout, number=number, measure=measure
            )
            try:
                processes.watch(call)
                for rank, each in arguments.items():
                    call.send(rank, messages[id(each)])
            except BaseException as error:
                processes.break_while_sending(call, error)
                raise
        return call

    def fetch(self, handles: Sequence[Any]) -> list[Any]:
        """Return the values of object references; raise the error of the call that failed to produce one."""
        try:
            return fetch(handles)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, GroupError) else error) from None

    def shutdown(self) -> None:
        """Shut down the processes, and with them every role that they run."""
        self.processes.shutdown()


class RayCall(SentCall):
    """A call of a role; see ``mcontroller.transport.InFlightCall``."""

    def __init__(
        self,
        processes: GroupProcesses,
        role: str,
        method: str,
        ranks: tuple[int, ...],
        returning: Sequence[int],
        *,
        timeout: float | None,
        number: int,
        measure: bool,
    ) -> None:
        super().__init__(role, method, ranks, timeout=timeout, number=number)
        self._processes = processes
        self._measure = measure
        self._returned: dict[int, list[Any]] = {rank: [] for rank in returning}
        self._answers: list[Any] | None = None
        self._values: list[Any] | None = None
        self._error: GroupError | None = None

    def send(self, rank: int, message: Any) -> None:
        """Send the call to one of its ranks. A measured call has two answers: the value, and its row count."""
        run = self._processes.handles.actors[rank].call
        answer = run.options(num_returns=2).remote(message) if self._measure else [run.remote(message)]
        self.refs.append(answer[-1])
        if rank in self._returned:
            self._returned[rank] = answer

    @property
    def parts(self) -> list[Any]:
        """References of the returned values, in the order of the results."""
        return [answer[0] for answer in self._returned.values()]

    @property
    def lengths(self) -> list[Any]:
        """References of the row counts of the returned values; empty unless the call is measured."""
        return [answer[1] for answer in self._returned.values()] if self._measure else []

    def result(self, timeout: float | None = None, *, joined: bool = False) -> list[Any]:
        """Wait for every rank and return the values; see ``InFlightCall.result``."""
        answers = self._settled(timeout)
        if self._values is None:
            if self._measure:  # the answers are row counts
                self._values = fetch(self.parts)
            else:
                by_rank = dict(zip(self.ranks, answers, strict=True))
                self._values = [unpack(by_rank[rank], shared=joined) for rank in self._returned]
            self._answers = []
        return self._values

    def check(self, timeout: float | None = None) -> None:
        """Wait for every rank and raise the error of the call, if it failed."""
        self._settled(timeout)

    def _settled(self, timeout: float | None) -> list[Any]:
        if self._error is not None:
            raise self._error
        if self._answers is None:
            try:
                self._answers = self._processes.settle(self, timeout)
            except GroupError as error:
                self._error = error
                raise
        return self._answers

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every rank has answered or failed; return whether that happened in time."""
        return self._error is not None or self._processes.wait(self, timeout)

    def done(self) -> bool:
        """Whether every rank has answered or failed. Does not wait."""
        return self.wait(0.0)

    def cancel(self) -> None:
        """Cancel the call on all ranks if none has started it; otherwise all run it, and the values are dropped."""
        if self._answers is None and self._error is None:
            text = f"{self.role}.{self.method} was cancelled"
            self._error = GroupError(text, role=self.role, method=self.method)
            self._processes.cancel(self)


class Stored(Deferred):
    """A value in the object store, for every rank that reads it."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def handles(self) -> Sequence[Any]:
        """Return the reference of the value."""
        return (self._ref,)

    def resolve(self, fetch: Fetch) -> Any:
        """Return the value."""
        return fetch((self._ref,))[0]
