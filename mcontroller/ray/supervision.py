"""Supervision of a group's processes: the calls in flight, the first failure, and the end.

The first failure ends every process of the group. Ranks that wait for a peer in a collective would wait forever, so
nothing more is sent to them: they are killed at once, and later calls raise GroupBroken with the first cause.
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
from mcontroller.ray.control import ControlAddress, notify, query
from mcontroller.ray.failures import RankFailure, RankLabel, first_cause
from mcontroller.ray.process import ArgumentLost, ProcessInfo
from mcontroller.ray.reservation import session

__all__ = ["GroupProcesses", "ProcessHandles", "SentCall", "living_groups"]

DRAIN_SECONDS = 0.25
"""Time to wait for failures that come together with the first one, so that they are counted with it."""

CAUSE_SECONDS = 2.0
"""Time to wait for the cause, if all known failures are consequences of another."""

QUERY_SECONDS = 5.0
"""Timeout of out-of-band queries."""

END_SECONDS = 5.0
"""Time to wait until killed processes are gone."""


class SentCall:
    """A method that was sent to ranks, as supervision sees it.

    Attributes:
        role: the role that is called.
        method: name of the method.
        ranks: the ranks that run it.
        refs: an object reference for each rank that it was sent to, ready once the rank has answered or failed.
        timeout: deadline in seconds after ``started``; None for no deadline.
        number: number of the call among those of this controller; None for calls that cannot be cancelled.
        started: when the call was made, by ``time.monotonic``.
    """

    def __init__(
        self,
        role: str,
        method: str,
        ranks: tuple[int, ...],
        refs: Sequence[Any] = (),
        timeout: float | None = None,
        number: int | None = None,
    ) -> None:
        self.role = role
        self.method = method
        self.ranks = ranks
        self.refs = list(refs)
        self.timeout = timeout
        self.number = number
        self.started = time.monotonic()

    def remaining(self, timeout: float | None = None) -> float | None:
        """Return the seconds until the deadline, or ``timeout`` if that is less; None for no limit."""
        limits = [] if timeout is None else [timeout]
        if self.timeout is not None:
            limits.append(self.started + self.timeout - time.monotonic())
        return max(0.0, min(limits)) if limits else None


class Releasable(Protocol):
    """The slots that processes run in."""

    def release(self) -> None:
        """Free the slots, once the processes are gone."""


@dataclass(eq=False, slots=True)
class ProcessHandles:
    """The actors of a group and the slots that they hold, as needed to end them.

    Attributes:
        names: name of each process, by rank; detached processes are found by it.
        actors: Ray's handles of the processes, by rank.
        info_refs: reference of the ``ProcessInfo`` of each process, by rank.
        lease: the slots of the processes.
    """

    names: list[str]
    actors: list[Any]
    info_refs: list[Any]
    lease: Releasable
    _killed: bool = False
    _freed: bool = False
    _session: tuple[str, str] | None = field(default_factory=session)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def reachable(self) -> bool:
        """Whether this driver is still connected to the Ray cluster that the processes were started on."""
        return self._session is not None and self._session == session()

    @property
    def ended(self) -> bool:
        """Whether the processes were killed, or are out of reach."""
        return self._killed or not self.reachable

    def infos(self, timeout: float | None = 0.0) -> list[ProcessInfo | None]:
        """Return the info of each process; None for one that has not sent it within ``timeout`` seconds, or died."""
        ray.wait(self.info_refs, num_returns=len(self.info_refs), timeout=timeout)
        return [_value_or_none(ref) for ref in self.info_refs]

    def control_addresses(self, ranks: Sequence[int]) -> list[ControlAddress | None]:
        """Return the addresses of the control servers of these ranks."""
        infos = self.infos()
        return [info.control if info else None for info in (infos[rank] for rank in ranks)]

    def probe(self) -> list[Any]:
        """Return a reference for each process that fails once the process is gone."""
        return [actor.get_info.remote() for actor in self.actors]

    def end(self) -> None:
        """Kill the processes, wait until they are gone, and free their slots.

        A second call does nothing, unless the first was interrupted: then it does the same again.
        """
        with self._lock:
            self._killed = True
            if not self._freed and self.reachable:
                self._kill()
                self.lease.release()
                self._freed = True

    def _kill(self) -> None:
        infos = self.infos()
        for actor in self.actors:
            ray.kill(actor)
        deadline = time.monotonic() + END_SECONDS
        ray.wait(self.probe(), num_returns=len(self.actors), timeout=END_SECONDS)
        here = ray.get_runtime_context().get_node_id()
        for info in infos:
            while info is not None and info.node_id == here and _is_running(info.pid) and time.monotonic() < deadline:
                time.sleep(0.002)


class GroupProcesses:
    """The processes of the group ``name``, for every role that they run.

    Attributes:
        name: name of the group.
        handles: the processes themselves.
        detached: whether the group outlives this driver.
        coordinates: index on each axis, by role and rank, as far as known.
        caller: identifies this controller in the calls that it sends.
        sending: held while a call is sent, so that all ranks get the calls of several threads in one order.
    """

    def __init__(self, name: str, handles: ProcessHandles, *, detached: bool = False) -> None:
        self.name = name
        self.handles = handles
        self.detached = detached
        self.coordinates: dict[str, Sequence[Mapping[str, int]]] = {}
        self.caller = uuid.uuid4().hex
        self.sending = threading.RLock()
        self._calls: list[SentCall] = []
        self._broken: GroupError | None = None
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        if not detached:
            weakref.finalize(self, handles.end)
        _living.add(self)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.handles.actors)

    @property
    def nodes(self) -> list[str]:
        """The address of the node of every rank."""
        return [info.node if info else "unknown" for info in self.handles.infos(timeout=None)]

    def next_call(self) -> int:
        """Return the number of a new call."""
        return next(self._numbers)

    def watch(self, call: SentCall) -> None:
        """Add a call to those in flight, so that waiting for any of them notices its failure."""
        self._calls.append(call)

    def break_while_sending(self, call: SentCall, cause: BaseException) -> None:
        """End the group after an interrupt while a call was sent: ranks that have it would wait for the others."""
        self._break(
            lambda: GroupError(
                f"{type(cause).__name__} while {call.role}.{call.method} was being sent: {len(call.refs)} of "
                f"{len(call.ranks)} ranks are known to have it",
                role=call.role,
            )
        )

    def check(self, role: str) -> None:
        """Raise GroupBroken if an earlier call has failed, whether or not the caller asked for its result."""
        ended = self.handles.ended
        if not ended:
            self._poll()
        if self._broken is not None:
            self._raise_broken(role)
        if ended:
            by = "" if self.handles.reachable else ", together with the Ray cluster that it ran on"
            raise GroupError(f"group {role} has been shut down{by}: start it again to call it", role=role)

    def settle(self, call: SentCall, timeout: float | None = None) -> list[Any]:
        """Wait for all ranks of a call and return their answers, by position in ``call.ranks``.

        Raises:
            WorkerError: the method raised on a rank of this call, which is the first cause.
            WorkerDied: the process of a rank ended.
            CallTimeout: the deadline passed.
            GroupBroken: another call failed first.
        """
        if self.handles.ended:
            return self._settle_after_end(call)
        try:
            if len(self._calls) > 1:
                self._await(call, call.remaining(timeout))
            answers = ray.get(call.refs, timeout=call.remaining(timeout))
        except GetTimeoutError:
            raise self._break(lambda: self._timeout_error(call, timeout)) from None
        except RayError:
            if self.handles.ended and self._broken is None:  # shut down by another thread meanwhile
                return self._settle_after_end(call)
            self._fail(call)
        self._remove(call)
        return answers

    def wait(self, call: SentCall, timeout: float | None = None) -> bool:
        """Return whether all ranks of a call have answered or failed within ``timeout`` seconds. Does not raise."""
        if self.handles.ended:
            return True
        try:
            self._await(call, call.remaining(timeout))
        except GetTimeoutError:
            if call.remaining() != 0.0:
                return False
            self._break(lambda: self._timeout_error(call, None))
        except RayError:
            self._break(lambda: self._cause_of(self._drain()))
        return True

    def cancel(self, call: SentCall) -> bool:
        """Cancel a call on all ranks if none has started it; return whether it was cancelled. See ``Cancellation``."""
        if call.number is None or self.handles.ended:
            return False
        addresses = self.handles.control_addresses(call.ranks)
        cancelled = False
        try:
            cancelled = all(query(addresses, "prepare", self.caller, call.number, timeout=QUERY_SECONDS))
        finally:  # a rank that prepared and gets no decision would wait forever
            notify(addresses, "commit", self.caller, call.number, cancelled, timeout=QUERY_SECONDS)
        return cancelled

    def shutdown(self) -> None:
        """Call ``before_shutdown`` of the workers, end the processes and free their slots.

        A second call does nothing. Workers are not called if a call (of this driver or another) is still running, if
        the group is broken, or if its processes are gone.

        Raises:
            WorkerError: a worker's ``before_shutdown`` raised; the processes have been ended all the same.
        """
        try:
            call = self._send_finish()
            if call is not None:
                with contextlib.suppress(WorkerDied):
                    self.settle(call)
        finally:
            self.handles.end()

    def _send_finish(self) -> SentCall | None:
        with self.sending:
            if not self._is_idle():
                return None
            refs = [actor.finish.remote() for actor in self.handles.actors]
            call = SentCall(self.name, "before_shutdown", tuple(range(self.world_size)), refs)
            self.watch(call)
            return call

    def _is_idle(self) -> bool:
        if self.handles.ended:
            return False
        self._poll()
        if self._broken is not None or self._calls:
            return False
        return not self.detached or all(
            query(self.handles.control_addresses(range(self.world_size)), "idle", timeout=QUERY_SECONDS)
        )

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def _await(self, call: SentCall, seconds: float | None) -> None:
        """Wait for one call; raise as soon as any call of the group has failed."""
        deadline = None if seconds is None else time.monotonic() + seconds
        own = set(call.refs)
        known = tuple(self._calls)
        calls = known if call in known else (call, *known)
        answers = [_answers_of(rank, calls) for rank in range(self.world_size)]
        nexts = [next(each, None) for each in answers]
        while own:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            pending = [ref for ref in nexts if ref is not None]
            ready, _ = ray.wait(pending, timeout=left, fetch_local=False)
            if not ready:
                raise GetTimeoutError
            ray.get(ready)
            own.difference_update(ready)
            nexts = [next(each, None) if ref in ready else ref for ref, each in zip(nexts, answers, strict=True)]

    def _poll(self) -> None:
        """Remove calls that are complete. A rank answers in order: a rank with a pending call has no later answer."""
        behind: set[int] = set()
        for call in tuple(self._calls):
            if len(behind) == self.world_size:
                return
            asked = {ref: rank for rank, ref in zip(call.ranks, call.refs, strict=True) if rank not in behind}
            if not asked:
                continue
            ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=0, fetch_local=False)
            try:
                ray.get(ready)
            except RayError:
                self._break(lambda: self._cause_of(self._drain()))
                return
            behind.update(asked[ref] for ref in late)
            if behind.isdisjoint(call.ranks):
                self._remove(call)

    def _remove(self, call: SentCall) -> None:
        with contextlib.suppress(ValueError):  # another thread has removed it
            self._calls.remove(call)

    def _settle_after_end(self, call: SentCall) -> list[Any]:
        """Return the answers of a call if they arrived before the end; else raise the cause of the end."""
        with contextlib.suppress(RayError):
            if self.handles.reachable:
                return ray.get(call.refs, timeout=0)
        if self._broken is not None:
            self._raise_broken(call.role)
        raise GroupError(
            f"group {call.role} was shut down before {call.method} was complete, or before its result was read",
            role=call.role,
        )

    # ---- the first failure -------------------------------------------------------------------------------------------

    def _raise_broken(self, role: str) -> NoReturn:
        raise GroupBroken(
            f"group {role} is broken and its processes are stopped; first cause: {self._broken}",
            role=role,
            first_cause=self._broken,
        ) from self._broken

    def _fail(self, call: SentCall) -> NoReturn:
        failures = self._drain()
        own = [failure for failure in failures if failure.call is call]
        if len(own) == len(call.ranks) and all(failure.upstream for failure in own):
            self._remove(call)  # no rank has started: the arguments were never produced, and the group is intact
            raise self._cause_of(own) from None
        raise self._break(lambda: self._cause_of(failures)) from None

    def _break(self, make: Any) -> GroupError:
        with self._lock:
            if self._broken is None:
                self._broken = make()
                self._calls.clear()
                self.handles.end()
            return self._broken

    def _cause_of(self, failures: Sequence[RankFailure]) -> GroupError:
        """Return the first cause; for a lost argument, the error of the group whose process should have produced it."""
        cause = first_cause(failures)
        if not isinstance(cause, ArgumentLost):
            return cause
        return next(filter(None, (group.error_for(cause.actor) for group in list(_living))), cause)

    def error_for(self, actor: str) -> GroupError | None:
        """Return the error that ended the process with Ray's id ``actor``; None for a process of another group."""
        if all(each._actor_id.hex() != actor for each in self.handles.actors) or not self.handles.reachable:
            return None
        return self._broken or first_cause(self._drain())

    def _drain(self) -> list[RankFailure]:
        """Return the failures known so far, and those that come with them, up to the cause that they follow from."""
        end = time.monotonic() + CAUSE_SECONDS
        probes = SentCall(self.name, "no call", tuple(range(self.world_size)), self.handles.probe())
        failures = self._failures(probes)
        while _is_incomplete(failures) and time.monotonic() < end:
            failures = self._failures(probes)
        return failures

    def _failures(self, probes: SentCall) -> list[RankFailure]:
        calls = [*self._calls, probes]
        refs = [ref for call in calls for ref in call.refs]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=DRAIN_SECONDS, fetch_local=False)[0])
        found: dict[int, RankFailure] = {}
        infos = self.handles.infos()
        for call in calls:
            for rank, ref in zip(call.ranks, call.refs, strict=False):  # a call that is being sent has fewer refs
                error = _error_or_none(ref) if ref in ready else None
                if error is not None and rank not in found:
                    found[rank] = RankFailure(self._label(call.role, rank, infos[rank]), call.method, error, call)
        return list(found.values())

    def _label(self, role: str, rank: int, info: ProcessInfo | None) -> RankLabel:
        coordinates = self.coordinates.get(role)
        return RankLabel(role, rank, coordinates[rank] if coordinates else {}, info)

    def _timeout_error(self, call: SentCall, timeout: float | None) -> CallTimeout:
        _, refs = ray.wait(call.refs, num_returns=len(call.refs), timeout=0, fetch_local=False)
        late = [rank for rank, ref in zip(call.ranks, call.refs, strict=True) if ref in refs]
        unknown = "(no answer: the process is in native code that holds the interpreter, or is gone)"
        answers = query(self.handles.control_addresses(late), "stack", timeout=QUERY_SECONDS)
        stacks = {rank: answer or unknown for rank, answer in zip(late, answers, strict=True)}
        infos = self.handles.infos()
        labels = [self._label(call.role, rank, infos[rank]) for rank in late]
        limit = min(limit for limit in (call.timeout, timeout) if limit is not None)
        listed = "\n".join(f"{label}:\n{stacks[label.rank]}" for label in labels)
        return CallTimeout(
            f"{call.role}.{call.method} had no answer in {limit:g} s from {len(late)} of {len(call.ranks)} "
            f"ranks, {', '.join(map(str, late))}:\n{listed}",
            role=call.role,
            method=call.method,
            timeout=limit,
            ranks=tuple(late),
            stacks=stacks,
        )


_living: weakref.WeakSet[GroupProcesses] = weakref.WeakSet()


def living_groups() -> list[GroupProcesses]:
    """Return the groups of this driver that have not ended."""
    return [group for group in list(_living) if not group.handles.ended]


def _is_incomplete(failures: Sequence[RankFailure]) -> bool:
    """Return whether more failures are expected: the cause of the known ones, or ranks without their arguments."""
    failed = {id(failure.call): failure.call for failure in failures}
    expected = sum(len(call.ranks) for call in failed.values())
    return all(failure.follows for failure in failures) or (
        all(failure.upstream for failure in failures) and len(failures) < expected
    )


def _answers_of(rank: int, calls: Sequence[SentCall]) -> Iterator[Any]:
    """Yield the references of one rank, in the order in which it answers them."""
    for call in calls:
        if rank in call.ranks:
            index = call.ranks.index(rank)
            if index < len(call.refs):  # a call that is being sent has fewer refs
                yield call.refs[index]


def _is_running(pid: int) -> bool:
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
