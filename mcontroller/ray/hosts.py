"""The processes of one group, as the controller holds them: their start, their calls in flight, their end.

The first failure ends all of them. Ranks that wait for a peer in a collective would wait for ever, so nothing is
asked of them any more: they are killed at once, and later calls are told the first cause.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayError

from mcontroller.errors import CallTimeout, GroupBroken, GroupError, WorkerDied
from mcontroller.ray.desk import Desk, ask, tell
from mcontroller.ray.failures import Failure, Place, first_cause
from mcontroller.ray.gate import Ticket
from mcontroller.ray.host import ArgumentLost, HostInfo
from mcontroller.ray.reservation import session

__all__ = ["Flight", "Hosts", "Processes"]

DRAIN_SECONDS = 0.25
"""How long the failures that come together with the first one are waited for, to be counted with it."""

CAUSE_SECONDS = 2.0
"""How long the cause is waited for when all that is known are its consequences."""

ANSWER_SECONDS = 5.0
"""How long a process is waited for that is asked beside its call."""

END_SECONDS = 5.0


@dataclass(eq=False, slots=True)
class Flight:
    """One method on its way on some ranks; ``refs`` has one entry a rank, ready when that rank has answered."""

    role: str
    method: str
    ranks: tuple[int, ...]
    refs: list[Any]
    timeout: float | None
    ticket: Ticket | None = None
    started: float = field(default_factory=time.monotonic)

    def remaining(self, timeout: float | None = None) -> float | None:
        """Seconds until the deadline or for ``timeout`` more, whichever is less; None for no limit."""
        limits = [] if timeout is None else [timeout]
        if self.timeout is not None:
            limits.append(self.started + self.timeout - time.monotonic())
        return max(0.0, min(limits)) if limits else None


class Places(Protocol):
    """What the processes sit in."""

    def leave(self) -> None:
        """Frees it, once the processes are gone."""


@dataclass(eq=False, slots=True)
class Processes:
    """What has to be ended: the actors, the slots they sit in, and how to see that they are gone."""

    names: list[str]
    handles: list[Any]
    introductions: list[Any]
    places: Places
    _killed: bool = False
    _freed: bool = False
    _session: tuple[str, str] | None = field(default_factory=session)
    _turn: threading.RLock = field(default_factory=threading.RLock)

    @property
    def reachable(self) -> bool:
        """Whether Ray still runs that they were started with; what was shut down may have been started anew."""
        return self._session is not None and self._session == session()

    @property
    def ended(self) -> bool:
        return self._killed or not self.reachable

    def infos(self, timeout: float | None = 0.0) -> list[HostInfo | None]:
        """Where each process runs; None for one that has not said so in ``timeout`` seconds, or could not."""
        ray.wait(self.introductions, num_returns=len(self.introductions), timeout=timeout)
        return [_value_or_none(ref) for ref in self.introductions]

    def desks(self, ranks: Sequence[int]) -> list[Desk | None]:
        """Where these ranks are asked while they are busy."""
        infos = self.infos()
        return [info.desk if info else None for info in (infos[rank] for rank in ranks)]

    def probe(self) -> list[Any]:
        """A ref for each process, which fails once the process is gone, and is answered when it has nothing to do."""
        return [handle.introduce.remote() for handle in self.handles]

    def end(self) -> None:
        """Kills the processes, waits until they are gone, and frees their slots.

        A second call does nothing, unless the first was interrupted: then it does the same again.
        """
        with self._turn:
            self._killed = True
            if not self._freed and self.reachable:
                self._kill()
                self.places.leave()
                self._freed = True

    def _kill(self) -> None:
        infos = self.infos()
        for handle in self.handles:
            ray.kill(handle)
        deadline = time.monotonic() + END_SECONDS
        ray.wait(self.probe(), num_returns=len(self.handles), timeout=END_SECONDS)
        here = ray.get_runtime_context().get_node_id()
        for info in infos:
            while info is not None and info.node_id == here and _runs(info.pid) and time.monotonic() < deadline:
                time.sleep(0.002)


class Hosts:
    """The processes of the group ``name``, for every role that lives in them."""

    def __init__(self, name: str, processes: Processes, *, detached: bool = False) -> None:
        self.name = name
        self.processes = processes
        self.coordinates: dict[str, Sequence[Mapping[str, int]]] = {}
        self._flights: list[Flight] = []
        self._broken: GroupError | None = None
        self._lock = threading.RLock()
        self.sending = threading.RLock()
        """Held while a call is sent, so that all ranks get the calls of several threads in one order."""
        self._caller = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._detached = detached
        if not detached:
            weakref.finalize(self, processes.end)
        _living.add(self)

    @property
    def world_size(self) -> int:
        return len(self.processes.handles)

    @property
    def nodes(self) -> list[str]:
        """The node address of every rank."""
        return [info.node if info else "unknown" for info in self.processes.infos(timeout=None)]

    def ticket(self) -> Ticket:
        """The name of the next call."""
        return Ticket(self._caller, next(self._numbers))

    def depart(self, flight: Flight) -> None:
        """Notes a call, so that its failure is seen by whichever call is waited for."""
        self._flights.append(flight)

    def cut_off(self, flight: Flight, cause: BaseException) -> None:
        """Ends the group where sending a call was interrupted: ranks that have it would wait for the others."""
        self._break(
            lambda: GroupError(
                f"{type(cause).__name__} while {flight.role}.{flight.method} was being sent: {len(flight.refs)} of "
                f"{len(flight.ranks)} ranks are known to have it",
                role=flight.role,
            )
        )

    def check(self, role: str) -> None:
        """Raises GroupBroken when a call before has failed, whether or not its result was asked for."""
        ended = self.processes.ended
        if not ended:
            self._poll()
        if self._broken is not None:
            self._refuse(role)
        if ended:
            by = "" if self.processes.reachable else ", with the Ray that it was started on"
            raise GroupError(f"group {role} has been shut down{by}: start it again to call it", role=role)

    def settle(self, flight: Flight, timeout: float | None = None) -> list[Any]:
        """What the refs of a flight hold, once all of its ranks have answered.

        Raises what the first failing rank raised, CallTimeout past the deadline, GroupBroken for another's failure.
        """
        if self.processes.ended:
            return self._posthumous(flight)
        try:
            if len(self._flights) > 1:
                self._await(flight, flight.remaining(timeout))
            values = ray.get(flight.refs, timeout=flight.remaining(timeout))
        except GetTimeoutError:
            self._late(flight, timeout)
        except RayError:
            if self.processes.ended and self._broken is None:  # shut down by another thread meanwhile
                return self._posthumous(flight)
            self._fail(flight)
        self._arrived(flight)
        return values

    def wait(self, flight: Flight, timeout: float | None = None) -> bool:
        """Whether all ranks of a flight have answered, or failed, within ``timeout`` seconds; raises nothing."""
        if self.processes.ended:
            return True
        try:
            self._await(flight, flight.remaining(timeout))
        except GetTimeoutError:
            if flight.remaining() != 0.0:
                return False
            self._break(lambda: self._timeout_of(flight, None))
        except RayError:
            self._break(self._first_cause)
        return True

    def withdraw(self, flight: Flight) -> bool:
        """Takes a call back if no rank has begun it, and says so; a call that one has begun is run by all.

        A rank that ran it alone would wait for its peers for ever.
        """
        if flight.ticket is None or self.processes.ended:
            return False
        desks = self.processes.desks(flight.ranks)
        nobody = False
        try:
            nobody = all(ask(desks, "hold", *flight.ticket, timeout=ANSWER_SECONDS))
        finally:  # a rank that is held and never told would wait for ever
            tell(desks, "decide", *flight.ticket, nobody, timeout=ANSWER_SECONDS)
        return nobody

    def shutdown(self) -> None:
        """Has the workers finish, ends the processes and frees their slots; a second call does nothing.

        Raises WorkerError, after the end, where a worker could not finish. None is asked to where a call, of this
        driver or another, has not answered, the group is broken, or its processes are gone already.
        """
        try:
            flight = self._send_finish()
            if flight is not None:
                with contextlib.suppress(WorkerDied):
                    self.settle(flight)
        finally:
            self.processes.end()

    def _send_finish(self) -> Flight | None:
        with self.sending:
            if not self._is_idle():
                return None
            finished = [host.finish.remote() for host in self.processes.handles]
            flight = Flight(self.name, "before_shutdown", tuple(range(self.world_size)), finished, None)
            self.depart(flight)
            return flight

    def _is_idle(self) -> bool:
        if self.processes.ended:
            return False
        self._poll()
        if self._broken is not None or self._flights:
            return False
        return not self._detached or all(
            ask(self.processes.desks(range(self.world_size)), "idle", timeout=ANSWER_SECONDS)
        )

    # ---- one failure ends all --------------------------------------------------------------------------------------

    def _await(self, flight: Flight, seconds: float | None) -> None:
        """Waits for one flight, and raises as soon as any flight of the group has failed."""
        deadline = None if seconds is None else time.monotonic() + seconds
        own = set(flight.refs)
        known = tuple(self._flights)
        flights = known if flight in known else (flight, *known)
        answers = [_answers_of(rank, flights) for rank in range(self.world_size)]
        nexts = [next(each, None) for each in answers]
        while own:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            open_ = [ref for ref in nexts if ref is not None]
            ready, _ = ray.wait(open_, timeout=left, fetch_local=False)
            if not ready:
                raise GetTimeoutError
            ray.get(ready)
            own.difference_update(ready)
            nexts = [next(each, None) if ref in ready else ref for ref, each in zip(nexts, answers, strict=True)]

    def _poll(self) -> None:
        """Notes what has arrived. A rank answers its calls in order: behind one that is open nothing is to be seen."""
        behind: set[int] = set()
        for flight in tuple(self._flights):
            if len(behind) == self.world_size:
                return
            asked = {ref: rank for rank, ref in zip(flight.ranks, flight.refs, strict=True) if rank not in behind}
            if not asked:
                continue
            ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=0, fetch_local=False)
            try:
                ray.get(ready)
            except RayError:
                self._break(self._first_cause)
                return
            behind.update(asked[ref] for ref in late)
            if behind.isdisjoint(flight.ranks):
                self._arrived(flight)

    def _arrived(self, flight: Flight) -> None:
        with contextlib.suppress(ValueError):  # another thread has noted it
            self._flights.remove(flight)

    def _posthumous(self, flight: Flight) -> list[Any]:
        """The values of a flight that had arrived before the end; else what ended the group."""
        with contextlib.suppress(RayError):
            if self.processes.reachable:
                return ray.get(flight.refs, timeout=0)
        if self._broken is not None:
            self._refuse(flight.role)
        raise GroupError(
            f"group {flight.role} was shut down before the answer of {flight.method} was asked for, or had come",
            role=flight.role,
        )

    def _refuse(self, role: str) -> NoReturn:
        raise GroupBroken(
            f"group {role} is broken and its processes are stopped; first cause: {self._broken}",
            role=role,
            first_cause=self._broken,
        ) from self._broken

    def _fail(self, flight: Flight) -> NoReturn:
        failures = self._drain()
        mine = [failure for failure in failures if failure.flight is flight]
        if len(mine) == len(flight.ranks) and all(failure.upstream for failure in mine):
            self._arrived(flight)  # no rank has begun: the arguments were never made, and the group is whole
            raise _told(mine) from None
        raise self._break(lambda: _told(failures)) from None

    def _late(self, flight: Flight, timeout: float | None) -> NoReturn:
        raise self._break(lambda: self._timeout_of(flight, timeout)) from None

    def _break(self, make: Any) -> GroupError:
        with self._lock:
            if self._broken is None:
                self._broken = make()
                self._flights.clear()
                self.processes.end()
            return self._broken

    def _first_cause(self) -> GroupError:
        return _told(self._drain())

    def told(self, actor: str) -> GroupError | None:
        """What ended the process that Ray calls ``actor``, and with it this group; None for another's process."""
        if all(handle._actor_id.hex() != actor for handle in self.processes.handles) or not self.processes.reachable:
            return None
        return self._broken or first_cause(self._drain())

    def _drain(self) -> list[Failure]:
        """The failures known so far, and those that come with them; when all only follow, the cause they follow."""
        end = time.monotonic() + CAUSE_SECONDS
        probes = Flight(self.name, "no call", tuple(range(self.world_size)), self.processes.probe(), None)
        failures = self._failures(probes)
        while self._incomplete(failures) and time.monotonic() < end:
            failures = self._failures(probes)
        return failures

    def _incomplete(self, failures: Sequence[Failure]) -> bool:
        """Whether more is to come: a cause that is not among them, or the ranks beside one whose arguments failed."""
        failed = {id(failure.flight): failure.flight for failure in failures}
        expected = sum(len(flight.ranks) for flight in failed.values())
        return all(failure.follows for failure in failures) or (
            all(failure.upstream for failure in failures) and len(failures) < expected
        )

    def _failures(self, probes: Flight) -> list[Failure]:
        flights = [*self._flights, probes]
        refs = [ref for flight in flights for ref in flight.refs]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=DRAIN_SECONDS, fetch_local=False)[0])
        found: dict[int, Failure] = {}
        infos = self.processes.infos()
        for flight in flights:
            for rank, ref in zip(flight.ranks, flight.refs, strict=False):  # one that is being sent has fewer refs
                error = _error_or_none(ref) if ref in ready else None
                if error is not None and rank not in found:
                    found[rank] = Failure(self._place(flight.role, rank, infos[rank]), flight.method, error, flight)
        return list(found.values())

    def _place(self, role: str, rank: int, info: HostInfo | None) -> Place:
        coordinates = self.coordinates.get(role)
        return Place(role, rank, coordinates[rank] if coordinates else {}, info)

    def _timeout_of(self, flight: Flight, timeout: float | None) -> CallTimeout:
        _, refs = ray.wait(flight.refs, num_returns=len(flight.refs), timeout=0, fetch_local=False)
        late = [rank for rank, ref in zip(flight.ranks, flight.refs, strict=True) if ref in refs]
        unknown = "(no answer: the process holds the interpreter in native code, or is gone)"
        answers = ask(self.processes.desks(late), "stack", timeout=ANSWER_SECONDS)
        stacks = {rank: answer or unknown for rank, answer in zip(late, answers, strict=True)}
        infos = self.processes.infos()
        places = [self._place(flight.role, rank, infos[rank]) for rank in late]
        limit = min(limit for limit in (flight.timeout, timeout) if limit is not None)
        told = "\n".join(f"{place}:\n{stacks[place.rank]}" for place in places)
        return CallTimeout(
            f"{flight.role}.{flight.method} had no answer in {limit:g} s from {len(late)} of {len(flight.ranks)} "
            f"ranks, {', '.join(map(str, late))}:\n{told}",
            role=flight.role,
            method=flight.method,
            timeout=limit,
            ranks=tuple(late),
            stacks=stacks,
        )


_living: weakref.WeakSet[Hosts] = weakref.WeakSet()


def _told(failures: Sequence[Failure]) -> GroupError:
    """The first cause; for an argument whose maker has died, what the maker's group tells of that."""
    cause = first_cause(failures)
    if not isinstance(cause, ArgumentLost):
        return cause
    return next(filter(None, (hosts.told(cause.actor) for hosts in list(_living))), cause)


def _answers_of(rank: int, flights: Sequence[Flight]) -> Iterator[Any]:
    """The refs of one rank, in the order in which it answers them."""
    for flight in flights:
        if rank in flight.ranks:
            index = flight.ranks.index(rank)
            if index < len(flight.refs):  # one that is being sent has fewer refs
                yield flight.refs[index]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _value_or_none(ref: Any) -> Any:
    try:
        return ray.get(ref, timeout=0)
    except RayError:
        return None


def _error_or_none(ref: Any) -> RayError | None:
    try:
        ray.get(ref)
    except RayError as error:
        return error
    return None
