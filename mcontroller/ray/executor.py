"""RayExecutor: the calls of one role, carried to its processes and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from mcontroller.errors import GroupError
from mcontroller.ray.host import Order, fetch
from mcontroller.ray.hosts import Flight, Hosts
from mcontroller.ray.wire import Packed, pack, unpack
from mcontroller.transport import Deferred, Fetch, RankCall

__all__ = ["RayExecutor", "RayPending", "Stored"]


class RayExecutor:
    """The ranks of ``role`` in the processes ``hosts``; see ``mcontroller.transport.Executor``."""

    transport = "ray"

    def __init__(self, hosts: Hosts, role: str) -> None:
        self.hosts = hosts
        self.role = role

    @property
    def world_size(self) -> int:
        return self.hosts.world_size

    @property
    def nodes(self) -> Sequence[str]:
        return self.hosts.nodes

    def set_coordinates(self, coordinates: Sequence[Mapping[str, int]]) -> None:
        self.hosts.coordinates[self.role] = coordinates

    def share(self, value: Any, readers: int) -> Any:
        if readers <= 1:
            return value
        packed = pack(value)
        return Stored(ray.put(packed)) if isinstance(packed, Packed) and packed.large else value

    def submit(
        self, method: str, calls: Sequence[RankCall], *, timeout: float | None = None, measure: bool = False
    ) -> RayPending:
        with self.hosts.sending:
            return self._send(method, calls, timeout, measure)

    def _send(self, method: str, calls: Sequence[RankCall], timeout: float | None, measure: bool) -> RayPending:
        self.hosts.check(self.role)
        ticket = self.hosts.ticket()
        shippers: dict[int, list[int]] = {id(call.arguments): [] for call in calls}
        for call in calls:
            if call.ship:
                shippers[id(call.arguments)].append(call.rank)
        sent: dict[int, Any] = {}
        for call in calls:
            key = id(call.arguments)
            if key not in sent:
                order = Order(*ticket, self.role, method, shippers[key], measure)
                sent[key] = pack(call.arguments)._replace(head=tuple(order)).as_argument()
        flight = Flight(self.role, method, tuple(call.rank for call in calls), [], timeout, ticket)
        answers = []
        try:
            self.hosts.depart(flight)
            for call in calls:
                answers.append(self._start(call.rank, sent[id(call.arguments)], measure))
                flight.refs.append(answers[-1][-1])
        except BaseException as error:
            self.hosts.cut_off(flight, error)
            raise
        shipped = [answer for answer, call in zip(answers, calls, strict=True) if call.ship]
        return RayPending(self.hosts, flight, shipped, [call.ship for call in calls])

    def _start(self, rank: int, order: Any, measure: bool) -> list[Any]:
        run = self.hosts.processes.handles[rank].call
        return run.options(num_returns=2).remote(order) if measure else [run.remote(order)]

    def fetch(self, handles: Sequence[Any]) -> list[Any]:
        try:
            return fetch(handles)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, GroupError) else error) from None

    def shutdown(self) -> None:
        self.hosts.shutdown()


class RayPending:
    """A call on its way; ``answers`` are the refs of the ranks that ship: the value, and its rows when measured."""

    def __init__(self, hosts: Hosts, flight: Flight, answers: Sequence[list[Any]], ships: Sequence[bool]) -> None:
        self._hosts = hosts
        self._flight = flight
        self._ships = ships
        self.parts = [answer[0] for answer in answers]
        self.lengths = [answer[1] for answer in answers if len(answer) == 2]
        self._answers: list[Any] | None = None
        self._values: list[Any] | None = None
        self._error: GroupError | None = None

    def result(self, timeout: float | None = None, *, joined: bool = False) -> list[Any]:
        answers = self._settled(timeout)
        if self._values is None:
            shipped = [answer for answer, ship in zip(answers, self._ships, strict=True) if ship]
            self._values = fetch(self.parts) if self.lengths else [unpack(answer, shared=joined) for answer in shipped]
            self._answers = []
        return self._values

    def check(self, timeout: float | None = None) -> None:
        self._settled(timeout)

    def _settled(self, timeout: float | None) -> list[Any]:
        """What every rank answered, packed: its row count where rows are measured, else its value."""
        if self._error is not None:
            raise self._error
        if self._answers is None:
            try:
                self._answers = self._hosts.settle(self._flight, timeout)
            except GroupError as error:
                self._error = error
                raise
        return self._answers

    def wait(self, timeout: float | None = None) -> bool:
        return self._error is not None or self._hosts.wait(self._flight, timeout)

    def done(self) -> bool:
        return self.wait(0.0)

    def cancel(self) -> None:
        """Gives the call up: no rank runs it, unless one has begun; then all do, and what they give is dropped."""
        if self._answers is None and self._error is None:
            call = f"{self._flight.role}.{self._flight.method}"
            self._error = GroupError(f"{call} was cancelled", role=self._flight.role, method=self._flight.method)
            self._hosts.withdraw(self._flight)


class Stored(Deferred):
    """A value in the object store, for every rank that reads it."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def handles(self) -> Sequence[Any]:
        return (self._ref,)

    def resolve(self, fetch: Fetch) -> Any:
        return fetch((self._ref,))[0]
