"""The controller's side of the channel: connections to the processes of a group, the order of calls, and queries.

``Hub`` sends calls and delivers their answers. ``CallOrder`` gives calls one order on all ranks. ``ask`` and ``notify``
send queries, which a process answers while its main thread runs a call: stacks, cancellation, kept results.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import zmq
from typing_extensions import Buffer
from zmq.utils.monitor import recv_monitor_message

from mcontroller.channel.address import Address
from mcontroller.channel.wire import Place, configure, monitor, receive_frames, send_frames
from mcontroller.errors import DataError

RECONNECT_MS = 50
"""Milliseconds until a lost connection is tried again."""

RECONNECT_MAX_MS = 1_000
"""Largest time between two tries; it doubles with each."""

RECONNECT_SECONDS = 30.0
"""Time in which a lost connection to a living process must be restored; otherwise its group ends."""

CONNECT_MS = 5_000
"""Timeout of a TCP connect in milliseconds."""

LOOK_SECONDS = 1.0
"""Seconds until a thread that waits for another one, which polls, looks itself: the other may have been interrupted."""

LONGEST_POLL_MS = 2**31 - 1
"""Longest time in milliseconds that ``poll`` of the system takes, 24 days; a longer wait polls again."""

_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

_NOBLOCK = int(zmq.NOBLOCK)
"""A plain integer: pyzmq's enumerations cost time at each use."""

_local = threading.local()
"""The client of queries of each thread."""

_postponed: deque[tuple[Sequence[Address], str, tuple[Any, ...]]] = deque()
"""Queries that finalizers have left."""


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


class Hub:
    """Sends messages to ranks and delivers their answers, for any number of threads.

    Answers are delivered while some thread is in ``wait``. One waiting thread polls the socket; the others sleep until
    it has delivered something, or leaves.

    An interrupt (Ctrl-C) may end any method anywhere in the main thread. The lock is a lock of C that is only taken by
    ``with``, which releases it then. Whoever takes it next finds that its last holder was interrupted, and connects
    again: what was sent or received in part goes with the old connections, and is sent again, as after any loss.

    Args:
        name: identifies this controller to the ranks.
        deliver: called with the rank and the frames of each answer. The hub's lock is held.
        changed: called with a rank and whether its connection was established or lost. The hub's lock is held.
    """

    def __init__(
        self, name: bytes, deliver: Callable[[int, list[Any]], None], changed: Callable[[int, bool], None]
    ) -> None:
        self.name = name
        self._deliver = deliver
        self._changed = changed
        self._links = Links(name)
        self._addresses: list[Address] = []
        self._ids: list[bytes] = []
        self._ranks: dict[bytes, int] = {}
        self._turn = threading.Lock()
        self._in_use = False  # True without a holder of the lock: its last holder was interrupted
        self._sleeping: set[threading.Lock] = set()
        self._poller: int | None = None  # the thread that polls
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._woken = False  # whether it was written to: reading it in vain costs more
        self._poll = self._poll_for(self._links)
        self._closed = False

    @property
    def events_descriptor(self) -> int:
        """A descriptor to poll for reading: then a connection was lost or established, which ``wait`` finds out."""
        with self._turn:
            return self._wake if self._closed else self._links.filenos[1]

    def wake(self) -> None:
        """Have all threads in ``wait`` look again whether they are ready."""
        with self._turn:
            self._enter()
            self._wake_others()
            self._in_use = False

    def connect(self, addresses: Iterable[Address]) -> None:
        """Connect to the endpoint of every rank, in the order of ranks. Called once."""
        with self._turn:
            self._addresses = list(addresses)
            self._ids = [b"rank%d" % rank for rank in range(len(self._addresses))]
            self._ranks = {link: rank for rank, link in enumerate(self._ids)}
            self._connect()

    def _connect(self) -> None:
        for link, address in zip(self._ids, self._addresses, strict=True):
            self._links.connect(link, address.calls, address)

    def _poll_for(self, links: Links) -> select.poll:
        poll = select.poll()
        for descriptor in (*links.filenos, self._wake):
            poll.register(descriptor, select.POLLIN)
        return poll

    def _enter(self) -> None:
        """Connect again if the last holder of the lock was interrupted; the lock is held."""
        if self._in_use and not self._closed:
            for rank in range(len(self._addresses)):
                self._changed(rank, False)
            self._links.close()
            self._links = Links(self.name)
            self._poll = self._poll_for(self._links)
            self._connect()
            self._wake_others()
        self._in_use = True

    def send(self, messages: Iterable[tuple[int, Sequence[bytes]]]) -> None:
        """Send messages, each to its rank. Does not wait."""
        with self._turn:
            if self._closed:
                return
            self._enter()
            for rank, frames in messages:
                send_frames(self._links.socket, [self._ids[rank], *frames])
            if self._poller is not None:  # sending may have reset the descriptor that another thread polls
                self._receive()
            self._in_use = False

    def wait(self, ready: Callable[[], bool], seconds: float | None) -> bool:
        """Deliver answers until ``ready`` returns True; return False if that takes more than ``seconds``.

        Args:
            ready: whether to stop waiting. The hub's lock is held.
            seconds: with 0, deliver what has arrived.
        """
        end = None if seconds is None else time.monotonic() + seconds
        thread = threading.get_ident()
        news: threading.Lock | None = None
        try:
            while True:
                with self._turn:
                    self._enter()
                    if news is not None:
                        self._sleeping.discard(news)
                        news = None
                    if self._poller == thread:
                        self._poller = None  # until it polls again, or since an interrupt
                    self._receive()
                    finished = ready() or self._closed
                    left = None if end is None else end - time.monotonic()
                    over = finished or (left is not None and left <= 0)
                    if not over and self._poller is None:
                        self._poller, poll = thread, self._poll
                    elif not over:
                        news = threading.Lock()
                        news.acquire()
                        self._sleeping.add(news)
                    self._in_use = False
                if over:
                    return finished
                if news is not None:
                    news.acquire(timeout=LOOK_SECONDS if left is None else min(left, LOOK_SECONDS))
                else:
                    poll.poll(None if left is None else min(left * 1e3, LONGEST_POLL_MS))
        finally:  # let another thread poll; one that was interrupted here does so in its next ``wait``
            with self._turn:
                if self._poller == thread:
                    self._poller = None
                if self._poller is None:
                    self._wake_others()

    def close(self) -> None:
        """Close all connections. Threads that wait return."""
        with self._turn:
            self._closed = True
            self._links.close()
            self._wake_others()

    def __del__(self) -> None:
        self._links.close()
        os.close(self._wake)

    def _receive(self) -> None:
        """Deliver what has arrived; the lock is held.

        The descriptor of the socket is edge-triggered. After this, there is nothing that it has announced, until
        something is sent.
        """
        if self._closed:
            return
        news = False
        for link, frames in self._links.receive():
            self._deliver(self._ranks[link], frames)
            news = True
        for link, established in self._links.events():
            self._changed(self._ranks[link], established)
            news = True
        if self._woken and self._poller is None:  # else the news is for the thread that polls
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._woken = False
        if news:
            self._wake_others()

    def _wake_others(self) -> None:
        """Wake up the threads that sleep, and the one that polls; the lock is held."""
        while self._sleeping:
            self._sleeping.pop().release()
        if self._poller is not None:
            self._woken = True
            os.eventfd_write(self._wake, 1)


class Links:
    """A ROUTER socket that connects to endpoints. Each has an id, which the messages of ``socket`` begin with.

    Not safe for use by several threads at once.

    Args:
        name: identifies this process to the endpoints.
    """

    def __init__(self, name: bytes) -> None:
        self.socket = configure(_context(os.getpid()).socket(zmq.ROUTER))
        self.socket.routing_id = name
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
        self.socket.connect_timeout = CONNECT_MS
        self._monitor = monitor(self.socket, _MONITORED)
        self._monitor_poll = select.poll()
        self._monitor_poll.register(self._monitor.fileno(), select.POLLIN)
        self._monitor.get(zmq.EVENTS)  # from now on, the descriptor announces events
        self._ids: dict[str, bytes] = {}

    @property
    def filenos(self) -> tuple[int, int]:
        """Descriptors to poll for reading: of messages, and of ``events``. Both are edge-triggered."""
        return self.socket.fileno(), self._monitor.fileno()

    def connect(self, link: bytes, url: str, address: Address) -> None:
        """Connect to an endpoint. Messages can be sent at once; they leave when the connection is established."""
        self._ids[url] = link
        self.socket.ipv6 = ":" in address.host  # with IPv6, events name a mapped address after a reconnect
        if url.startswith("ipc:"):
            self.socket.curve_server = False  # unsets the mechanism: only this user can enter the folder
        else:
            self.socket.curve_serverkey = address.server_key
            self.socket.curve_publickey, self.socket.curve_secretkey = address.client.public, address.client.secret
        self.socket.setsockopt(zmq.CONNECT_ROUTING_ID, link)
        self.socket.connect(url)

    def disconnect(self, url: str) -> None:
        """Close the connection to an endpoint, and drop what was not sent."""
        if self._ids.pop(url, None) is not None:
            self.socket.disconnect(url)

    def receive(self) -> Iterator[tuple[bytes, list[Buffer]]]:
        """Yield the messages that have arrived: the link and the frames of each. Does not wait.

        At the end, the descriptor announces the next message.
        """
        with contextlib.suppress(zmq.Again):
            while True:
                link: bytes = self.socket.recv(_NOBLOCK)
                yield link, receive_frames(self.socket)

    def events(self) -> Iterator[tuple[bytes, bool]]:
        """Yield what happened to connections: the link, and whether it was established (or lost, or not accepted)."""
        if not self._monitor_poll.poll(0):  # costs less than asking ZeroMQ
            return
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                link = self._ids.get(event["endpoint"].decode())
                if link is not None:
                    yield link, event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def close(self) -> None:
        """Close all connections, and drop what was not sent. A second call does nothing."""
        if not self.socket.closed:
            self.socket.monitor(None, 0)  # before its reader closes: ZeroMQ's thread would wait for another reader
            self._monitor.close(0)
            self.socket.close(0)

    def __del__(self) -> None:
        self.close()  # in this order: left to the sockets, the reader of the events may close first


@cache
def _context(pid: int) -> zmq.Context[Any]:
    """Return the ZeroMQ context of this process's client sockets; a fork needs its own."""
    context: zmq.Context[Any] = zmq.Context()
    context.max_sockets = 65_000
    return context


# ---- queries --------------------------------------------------------------------------------------------------------


def ask(
    addresses: Sequence[Address | None], name: str, *arguments: Any, timeout: float | None
) -> list[tuple[Any, list[Any]] | None]:
    """Return the answer of each process, and the frames that came with it.

    None for an unknown address, a process that has ended or cannot be reached, or no answer in ``timeout`` seconds.

    Raises:
        DataError: if a process does not know the query, or cannot answer it with these arguments.
    """
    return _client().ask(addresses, [(name, arguments)] * len(addresses), timeout)[0]


def ask_each(
    addresses: Sequence[Address], queries: Sequence[tuple[str, tuple[Any, ...]]], timeout: float | None = None
) -> tuple[list[Any], list[int]]:
    """Ask each process its own query, a name with arguments; wait until all have answered, or are known to be gone.

    Returns:
        The answers as ``ask`` returns them; and the positions of those that were not there in ``timeout`` seconds, of
        processes that are not known to be gone.

    Raises:
        DataError: as ``ask``.
    """
    return _client().ask(addresses, queries, timeout)


def notify(addresses: Sequence[Address | None], name: str, *arguments: Any) -> None:
    """Send a query to each process; do not wait for the answers."""
    _client().send(addresses, [(name, arguments)] * len(addresses), wanted=False)


def notify_from_finalizer(addresses: Sequence[Address], name: str, *arguments: Any) -> None:
    """Call ``notify``, now or before the next query of any thread if this one is in the middle of a query."""
    _postponed.append((addresses, name, arguments))
    client: _Client | None = getattr(_local, "client", None)
    if not sys.is_finalizing() and (client is None or not client.busy):
        _client().send_postponed()


def _client() -> _Client:
    """Return the client of this thread. Its connections stay open for the next query, unless they are lost.

    One that is still busy was interrupted while it used its socket, and is replaced.
    """
    client: _Client | None = getattr(_local, "client", None)
    if client is None or client.pid != os.getpid() or client.busy:
        client = _local.client = _Client()
    return client


class _Client:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self._links = Links(uuid.uuid4().hex.encode())
        self._poll = select.poll()
        for descriptor in self._links.filenos:
            self._poll.register(descriptor, select.POLLIN)
        self._connected: dict[Address, tuple[bytes, str]] = {}  # the link, and the URL as it was then
        self._requests = itertools.count(1)
        self._connections = itertools.count()
        self.busy = False

    def send_postponed(self) -> None:
        """Send what finalizers have left, unless this thread is in the middle of a query."""
        while _postponed and not self.busy:
            with contextlib.suppress(IndexError):  # another thread was faster
                addresses, name, arguments = _postponed.popleft()
                self.send(addresses, [(name, arguments)] * len(addresses), wanted=False)

    def ask(
        self,
        addresses: Sequence[Address | None],
        queries: Sequence[tuple[str, tuple[Any, ...]]],
        timeout: float | None,
    ) -> tuple[list[Any], list[int]]:
        end = None if timeout is None else time.monotonic() + timeout
        waiting = self.send(addresses, queries, wanted=True)
        answers: list[Any] = [None] * len(addresses)
        while waiting:
            with self._in_use():
                for request, value, frames in self._received(waiting):
                    answers[waiting.pop(request)[0]] = (value, frames)
            left = None if end is None else end - time.monotonic()
            if not waiting or (left is not None and left <= 0):
                break
            self._poll.poll(None if left is None else min(left * 1e3, LONGEST_POLL_MS))
        return answers, sorted(position for position, _ in waiting.values())

    def send(
        self, addresses: Sequence[Address | None], queries: Sequence[tuple[str, tuple[Any, ...]]], *, wanted: bool
    ) -> dict[int, tuple[int, bytes]]:
        """Send queries; return the position and the link of each, by the number of the request."""
        waiting: dict[int, tuple[int, bytes]] = {}
        with self._in_use():
            self._drop_lost()
            for position, (address, (name, arguments)) in enumerate(zip(addresses, queries, strict=True)):
                if address is not None:
                    link = self._link(address)
                    number = next(self._requests) if wanted else 0
                    send_frames(self._links.socket, [link, pickle.dumps((number, name, arguments))])
                    waiting[number] = position, link
        self.send_postponed()
        return waiting

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep finalizers that run meanwhile from using the socket, and whoever comes after an interrupt."""
        self.busy = True
        yield
        self.busy = False

    def _link(self, address: Address) -> bytes:
        known = self._connected.get(address)
        if known is None:
            url = address.queries
            for other in [other for other, (_, other_url) in self._connected.items() if other_url == url]:
                self._forget(other)  # a process that has ended, whose port another has taken
            known = self._connected[address] = b"link%d" % next(self._connections), url  # ZeroMQ takes no id twice
            self._links.connect(*known, address)
        return known[0]

    def _received(self, waiting: dict[int, tuple[int, bytes]]) -> Iterator[tuple[int, Any, list[Any]]]:
        for _, frames in self._links.receive():
            number, value = pickle.loads(frames[0])
            if number in waiting:  # else it came after its timeout
                if isinstance(value, DataError):
                    raise value
                yield number, value, frames[1:]
        for lost in self._drop_lost():
            for number in [number for number, (_, link) in waiting.items() if link == lost]:
                del waiting[number]

    def _drop_lost(self) -> list[bytes]:
        """Close the connections that were lost or not accepted, and return them: their processes have ended."""
        lost = [link for link, established in self._links.events() if not established]
        for address in [address for address, (link, _) in self._connected.items() if link in lost]:
            self._forget(address)
        return lost

    def _forget(self, address: Address) -> None:
        self._links.disconnect(self._connected.pop(address)[1])
