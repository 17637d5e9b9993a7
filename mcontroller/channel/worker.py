"""The worker's side of the channel: calls are received on the main thread, queries are answered on another.

A call passes ``Endpoint.receive``, where it waits in a ``CallQueue`` for the call that it follows, and starts unless
its controller has cancelled it on all ranks (``Cancellation``). Its answer is sent by ``Endpoint.answer``; a value that
stays in the process until somebody asks for it is in ``KeptResults``.

Each call has a place: the call after which a rank runs it. A rank that has not received that call yet waits for it: a
message that was lost with its connection is sent again, and later ones may arrive before it. A controller assigns the
places itself if it is the only one. If there may be several (a detached group), rank 0 does, which costs one round
trip, 0.1 to 0.3 ms.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import zmq
from typing_extensions import Buffer

from mcontroller.channel.address import ChannelKeys
from mcontroller.channel.controller import RECONNECT_SECONDS, CallOrder
from mcontroller.channel.server import QueryServer, Reply
from mcontroller.channel.wire import CallHeader, Place, pack_answer, receive_frames, send_frames, unpack_call
from mcontroller.errors import GroupError

MISSING_SECONDS = RECONNECT_SECONDS + 10.0
"""Time to wait for a call that has a place but has not arrived.

A controller sends it again when its connection is restored, or ends the group. So after this time the controller has
ended while it was sending the call, and the ranks continue with the calls of others."""

DECISION_SECONDS = MISSING_SECONDS
"""Time in which a controller decides about a call that it has prepared to cancel. Later it has ended, and the call runs
as if it had not been prepared: on the ranks where it had started already, it runs in any case."""

WAIT_MS = 200
"""Milliseconds between looks for a call that is missing in the order of several controllers."""

T = TypeVar("T")

Received = tuple[bytes, CallHeader, memoryview, list[Buffer]]
"""A call, as it arrived: its controller, its header, the pickle of its arguments, and their buffers."""

Reader = Callable[[Any], None]
"""Called with the result of a call, or with None if it has been released."""


class Endpoint:
    """Receives the calls of controllers and answers their queries, until the process ends.

    If a call arrives twice, because its connection was lost, its answer is sent again. See ``wire`` for the frames.

    Args:
        host: the address of this machine, as other machines know it.
        keys: the keys of the group.
        queries: a function for each query; it gets a ``Reply`` and the arguments of the query, and runs on a thread.
        ports: the first and the last port to listen on; None for any.
        folder: the folder for sockets of this machine, see ``QueryServer``.
        forget: called with a controller that has ended, when another one calls; its answers have been dropped.

    Attributes:
        address: where controllers connect to.

    Raises:
        OSError: no port is free.
    """

    def __init__(
        self,
        host: str,
        keys: ChannelKeys,
        queries: Mapping[str, Callable[..., None]],
        ports: tuple[int, int] | None = None,
        folder: str | None = None,
        forget: Callable[[bytes], None] = lambda caller: None,
    ) -> None:
        self.cancellation = Cancellation()
        self._queue: CallQueue[Received] = CallQueue()
        self._answers: dict[bytes, OrderedDict[int, list[bytes]]] = defaultdict(OrderedDict)
        self._forget = forget
        self._unreachable: dict[bytes, float] = {}
        order = CallOrder()
        queries_of_channel: dict[str, Callable[..., None]] = {
            "prepare": lambda reply, *call: reply(self.cancellation.prepare(*call)),
            "commit": self._commit,
            "place": lambda reply, *call: reply(order.assign(*call)),
        }
        server = QueryServer(host, keys, ports, folder)
        self._calls, call_port = server.listen("calls")
        self._calls.router_mandatory = True  # sending to a controller that is not connected raises
        server.start({**queries_of_channel, **queries}, call_port)
        self.address = server.address

    def receive(self) -> Received:
        """Wait for the next call in order and return it. Called by the main thread."""
        while True:
            call = self._queue.next()
            if call is not None:
                return call
            if not self._queue.waiting or self._calls.poll(WAIT_MS):
                caller, frames = self._calls.recv(), receive_frames(self._calls)
                if not caller.startswith(b"\0"):  # else ZeroMQ has renamed a lost connection: they are sent again
                    self._add(caller, frames)

    def _add(self, caller: bytes, frames: list[Buffer]) -> None:
        header, data = unpack_call(frames.pop(0))
        if caller not in self._answers:
            self._look_for_unreachable()
        if self._unreachable:
            self._drop_unreachable()
        answers = self._answers[caller]
        while answers and next(iter(answers)) < header.settled:
            answers.popitem(last=False)
        added = self._queue.add(caller, header.number, header.after, (caller, header, data, frames))
        if not added and header.number in answers:  # else it has not run yet
            self._send(caller, answers[header.number])

    def answer(
        self,
        caller: bytes,
        number: int,
        data: bytes,
        frames: Sequence[bytes] = (),
        error: GroupError | None = None,
        stored: bool = False,
    ) -> None:
        """Send the answer of a call, see ``pack_answer``; ``frames`` are the buffers of the value."""
        answer = [pack_answer(number, error, stored, data), *frames]
        self._answers[caller][number] = answer
        self._send(caller, answer)

    def _commit(self, reply: Reply, caller: bytes, number: int, cancelled: bool) -> None:
        self.cancellation.commit(caller, number, cancelled)
        reply(None)

    def _send(self, caller: bytes, answer: Sequence[bytes]) -> bool:
        """Send an answer; return False if its controller is not connected, which asks again if it lives."""
        try:
            send_frames(self._calls, [caller, *answer])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _look_for_unreachable(self) -> None:
        """Note the controllers that are not connected now. Sending an answer again is harmless."""
        for caller, answers in self._answers.items():
            if answers and not self._send(caller, next(iter(answers.values()))):
                self._unreachable.setdefault(caller, time.monotonic())

    def _drop_unreachable(self) -> None:
        """Drop what is kept for controllers that have not connected again for longer than a living one takes."""
        for caller, since in tuple(self._unreachable.items()):
            if time.monotonic() - since > MISSING_SECONDS:
                del self._unreachable[caller]
                answers = self._answers[caller]
                if answers and not self._send(caller, next(iter(answers.values()))):
                    del self._answers[caller]
                    self._forget(caller)


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
        place = (caller, number)
        if self._has(place) or (self.waiting and any(waiting == place for _, _, waiting, _ in self.waiting)):
            return False
        if after is None or self._has(after):
            self._append(place, call)
        else:
            self.waiting.append((time.monotonic() + MISSING_SECONDS, after, place, call))
        return True

    def next(self) -> T | None:
        """Return the next call that may run now, if there is one."""
        if not self._ready and self.waiting and self.waiting[0][0] < time.monotonic():
            _, _, place, call = self.waiting.pop(0)
            self._append(place, call)
        return self._ready.popleft() if self._ready else None

    def _append(self, place: Place, call: T) -> None:
        """Let a call run, and after it those that waited for it."""
        caller, number = place
        self._received[caller] = max(number, self._received.get(caller, -1))
        self._ready.append(call)
        if free := next((entry for entry in self.waiting if self._has(entry[1])), None) if self.waiting else None:
            self.waiting.remove(free)
            self._append(free[2], free[3])

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
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._started: dict[bytes, int] = {}
        self._prepared: dict[tuple[bytes, int], float] = {}  # until when a decision counts
        self._decisions: dict[tuple[bytes, int], bool] = {}

    def start(self, caller: bytes, number: int) -> bool:
        """Return whether the call is to be run; wait while a decision about it is prepared."""
        call = caller, number
        with self._lock:
            while call in self._prepared and (left := self._prepared[call] - time.monotonic()) > 0:
                self._changed.wait(left)
            self._prepared.pop(call, None)
            self._started[caller] = number
            return not self._decisions.pop(call, False)

    def prepare(self, caller: bytes, number: int) -> bool:
        """Keep a call from starting until ``commit``; return False if it has started or is decided already."""
        with self._lock:
            possible = not self._has_started(caller, number) and (caller, number) not in self._decisions
            if possible:
                self._prepared[caller, number] = time.monotonic() + self._decision_seconds
            return possible

    def commit(self, caller: bytes, number: int, cancelled: bool) -> None:
        """Let a prepared call start, or never start if it is ``cancelled`` in time."""
        with self._lock:
            in_time = self._prepared.pop((caller, number), math.inf) > time.monotonic()
            if not self._has_started(caller, number):
                self._decisions[caller, number] = cancelled and in_time
            self._changed.notify_all()

    def _has_started(self, caller: bytes, number: int) -> bool:
        return number <= self._started.get(caller, -1)


@dataclass(slots=True)
class KeptResults:
    """The results of calls, by call. A reader that comes before the result waits. Safe for use by several threads."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _results: dict[Place, Any] = field(default_factory=dict)
    _readers: dict[Place, list[Reader]] = field(default_factory=dict)
    _released: dict[bytes, set[int]] = field(default_factory=dict)
    _finished: dict[bytes, int] = field(default_factory=dict)

    def finish(self, key: Place, result: Any | None) -> None:
        """Note that a call has ended. Keep its result, if it has one, until ``release``, and pass it to its readers."""
        caller, number = key
        with self._lock:
            self._finished[caller] = number
            released = self._released.get(caller, set())
            if number in released:
                released.discard(number)
            elif result is not None:
                self._results[key] = result
            readers = self._readers.pop(key, ())
        for read in readers:
            read(result)

    def read(self, key: Place, read: Reader) -> None:
        """Pass the result of a call to ``read``, now or when it is there; None if it was released."""
        with self._lock:
            if key not in self._results and not self._has_finished(key):
                self._readers.setdefault(key, []).append(read)
                return
            result = self._results.get(key)
        read(result)

    def release(self, key: Place) -> None:
        """Drop the result of a call, also if it is still to come."""
        with self._lock:
            if self._results.pop(key, None) is None and not self._has_finished(key):
                self._released.setdefault(key[0], set()).add(key[1])

    def release_all(self, caller: bytes) -> None:
        """Drop all results of a controller that has ended."""
        with self._lock:
            for key in [key for key in self._results if key[0] == caller]:
                del self._results[key]
            self._released.pop(caller, None)

    def _has_finished(self, key: Place) -> bool:
        return key[1] <= self._finished.get(key[0], -1)

    def __len__(self) -> int:
        return len(self._results)
