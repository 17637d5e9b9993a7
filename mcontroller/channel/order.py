"""One order of calls on all ranks, also if a connection is lost or several controllers send them; and cancellation.

Each call has a place: the call after which a rank runs it. A rank that has not received that call yet waits for it: a
message that was lost with its connection is sent again, and later ones may arrive before it. A controller assigns the
places itself if it is the only one. If there may be several (a detached group), rank 0 does, which costs one round
trip, 0.1 to 0.3 ms.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from mcontroller.channel.links import RECONNECT_SECONDS

MISSING_SECONDS = RECONNECT_SECONDS + 10.0
"""Time to wait for a call that has a place but has not arrived.

A controller sends it again when its connection is restored, or ends the group. So after this time the controller has
ended while it was sending the call, and the ranks continue with the calls of others."""

DECISION_SECONDS = MISSING_SECONDS
"""Time in which a controller decides about a call that it has prepared to cancel. Later it has ended, and the call runs
as if it had not been prepared: on the ranks where it had started already, it runs in any case."""

T = TypeVar("T")


Place = tuple[bytes, int]
"""The call after which another runs on a rank: its controller, and its number there."""


class CallOrder:
    """Assigns places. Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[int, Place] = {}
        self._assigned: dict[bytes, tuple[int, list[Place | None]]] = {}

    def assign(self, caller: bytes, number: int, ranks: Sequence[int]) -> list[Place | None]:
        """Return, for each rank of a call, the call that it follows there; None for the first.

        A controller whose connection was lost asks for the place of its last call again, and gets the same.
        """
        place = (caller, number)
        with self._lock:
            known, before = self._assigned.get(caller, (-1, []))
            if known != number:
                before = [self._last.get(rank) for rank in ranks]
                self._last.update(dict.fromkeys(ranks, place))
                self._assigned[caller] = number, before
        return before


class CallQueue(Generic[T]):
    """The calls that a rank has received, each once, in its order, behind the calls that they follow.

    Used by one thread.

    Attributes:
        waiting: the calls that wait for one that has not arrived: until when, for which, as which, and the call.
    """

    def __init__(self) -> None:
        self._received: dict[bytes, int] = {}
        self._ready: deque[T] = deque()
        self.waiting: list[tuple[float, Place, Place, T]] = []

    def add(self, caller: bytes, number: int, after: Place | None, call: T) -> bool:
        """Add a call; return False if it was added before (it has been sent again after a lost connection)."""
        if number <= self._received.get(caller, -1) or any(own == (caller, number) for _, _, own, _ in self.waiting):
            return False
        own = (caller, number)
        if after is None or self._has(after):
            self._append(own, call)
        else:
            self.waiting.append((time.monotonic() + MISSING_SECONDS, after, own, call))
        return True

    def next(self) -> T | None:
        """Return the next call that may run now, if there is one."""
        if not self._ready and self.waiting and self.waiting[0][0] < time.monotonic():
            _, _, own, call = self.waiting.pop(0)
            self._append(own, call)
        return self._ready.popleft() if self._ready else None

    def _append(self, own: Place, call: T) -> None:
        """Let a call run, and after it those that waited for it."""
        while True:
            caller, number = own
            self._received[caller] = max(number, self._received.get(caller, -1))
            self._ready.append(call)
            free = next((entry for entry in self.waiting if self._has(entry[1])), None)
            if free is None:
                return
            self.waiting.remove(free)
            _, _, own, call = free

    def _has(self, place: Place) -> bool:
        caller, number = place
        return number <= self._received.get(caller, -1)


class Cancellation:
    """Cancel a call on all ranks, or on none, before it starts.

    A rank that ran a call alone would wait for its peers in the first collective. So the controller first asks every
    rank to ``prepare``, which keeps the call from starting, and then has every rank ``commit`` the same decision. A
    call is known by its caller and its number; the numbers of a caller grow. The three methods may be called in any
    order, from several threads.

    Args:
        decision_seconds: time from ``prepare`` in which ``commit`` counts.

    Every call pays 0.6 us for ``start``, on 2 cores of a laptop-class CPU.
    """

    def __init__(self, decision_seconds: float = DECISION_SECONDS) -> None:
        self._decision_seconds = decision_seconds
        self._changed = threading.Condition(threading.Lock())
        self._started: dict[bytes, int] = {}
        self._prepared: dict[tuple[bytes, int], float] = {}  # until when a decision counts
        self._decisions: dict[tuple[bytes, int], bool] = {}

    def start(self, caller: bytes, number: int) -> bool:
        """Return whether the call is to be run; wait while a decision about it is prepared."""
        call = caller, number
        with self._changed:
            while (left := self._prepared.get(call, 0.0) - time.monotonic()) > 0:
                self._changed.wait(left)
            self._prepared.pop(call, None)
            self._started[caller] = number
            return not self._decisions.pop(call, False)

    def prepare(self, caller: bytes, number: int) -> bool:
        """Keep a call from starting until ``commit``; return False if it has started or is decided already."""
        with self._changed:
            possible = not self._has_started(caller, number) and (caller, number) not in self._decisions
            if possible:
                self._prepared[caller, number] = time.monotonic() + self._decision_seconds
            return possible

    def commit(self, caller: bytes, number: int, cancelled: bool) -> None:
        """Let a prepared call start, or never start if it is ``cancelled`` in time."""
        with self._changed:
            in_time = self._prepared.pop((caller, number), math.inf) > time.monotonic()
            if not self._has_started(caller, number):
                self._decisions[caller, number] = cancelled and in_time
            self._changed.notify_all()

    def _has_started(self, caller: bytes, number: int) -> bool:
        return number <= self._started.get(caller, -1)
