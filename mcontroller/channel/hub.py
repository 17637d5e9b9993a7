"""Hub: a controller's connections to all ranks of a group.

Every rank is connected over ZeroMQ. To one on the same machine, a local connection is opened as well, which is faster,
and takes the messages as long as it can: see ``local_connection``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from mcontroller.channel.address import Address
from mcontroller.channel.links import SNDMORE, Links, send, send_frames
from mcontroller.channel.local_connection import LocalConnection, LocalMemory, OutgoingMessage
from mcontroller.channel.local_listener import OpeningConnection
from mcontroller.errors import DataError

__all__ = ["Hub"]

_logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Seconds until a thread that waits for another one, which polls, looks itself: the other may have been interrupted."""


class Hub:
    """Sends messages to ranks and delivers their answers, for any number of threads.

    There is no background thread: answers are delivered while some thread is in ``wait``. One waiting thread polls the
    sockets; the others sleep until it has delivered something, or leaves.

    An interrupt (Ctrl-C) may end any method anywhere in the main thread. The lock is a lock of C that is only taken by
    ``with``, which releases it then. Whoever takes it next finds that its last holder was interrupted, and connects
    again: what was sent or received in part goes with the old connections, and is sent again, as after any loss.

    Args:
        name: identifies this controller to the ranks.
        deliver: called with the rank and the frames of each answer. The hub's lock is held.
        changed: called with a rank and whether its connection was established or lost. The hub's lock is held.
        dropped: called with a rank whose local connection was lost, perhaps with messages. The hub's lock is held.
    """

    def __init__(
        self,
        name: bytes,
        deliver: Callable[[int, list[Any]], None],
        changed: Callable[[int, bool], None],
        dropped: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self.name = name
        self._deliver = deliver
        self._changed = changed
        self._dropped = dropped
        self._links = Links(name)
        self._addresses: list[Address] = []
        self._ids: list[bytes] = []
        self._ranks: dict[bytes, int] = {}
        self._turn = threading.Lock()
        self._in_use = False  # True without a holder of the lock: its last holder was interrupted
        self._sleeping: set[threading.Lock] = set()
        self._poller: int | None = None  # the thread that polls
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._memory: LocalMemory | None = None
        self._unopened: dict[int, Address] = {}
        self._local: dict[int, LocalConnection] = {}
        self._opening: dict[int, OpeningConnection] = {}
        self._rank_at: dict[int, int] = {}
        self._poll_for: dict[int, select.poll] = {}
        self._messages, self._events = self._links.filenos
        self._look = True  # whether ZeroMQ may have messages that its descriptor does not announce: after sending
        self._poll = select.epoll()
        for descriptor in (self._messages, self._events, self._wake):
            self._poll.register(descriptor, select.EPOLLIN)
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the hub was closed."""
        return self._closed

    @property
    def local_ranks(self) -> int:
        """Number of ranks that have a local connection."""
        return len(self._local)

    def connect(self, addresses: Iterable[Address]) -> None:
        """Connect to the endpoint of every rank, in the order of ranks. Called once."""
        with self._turn:
            self._addresses = list(addresses)
            self._connect()

    def _connect(self) -> None:
        self._ids = [b"rank" + rank.to_bytes(4, "big") for rank in range(len(self._addresses))]
        self._ranks = {link: rank for rank, link in enumerate(self._ids)}
        self._unopened = {rank: address for rank, address in enumerate(self._addresses) if address.is_local}
        for link, address in zip(self._ids, self._addresses, strict=True):
            self._links.connect(link, address.calls, address)

    def _enter(self) -> None:
        """Connect again if the last holder of the lock was interrupted; the lock is held."""
        if self._in_use and not self._closed:
            for descriptor in (self._messages, self._events):
                with contextlib.suppress(OSError):  # an interrupt came between this and the registration
                    self._poll.unregister(descriptor)
            for rank in range(len(self._addresses)):
                self._changed(rank, False)
            self._close_connections()
            self._rank_at.clear()
            self._poll_for.clear()
            self._links = Links(self.name)
            self._messages, self._events = self._links.filenos
            for descriptor in (self._messages, self._events):
                self._poll.register(descriptor, select.EPOLLIN)
            self._connect()
            self._look = True
            self._wake_others()
        self._in_use = True

    def _open(self, rank: int, address: Address) -> None:
        """Begin to open a local connection, now that the rank can send over ZeroMQ what the connection cannot take."""
        with contextlib.suppress(OSError):  # then ZeroMQ does everything
            self._memory = self._memory or LocalMemory()
            opening = OpeningConnection(address.local, address.client.secret, self.name, self._memory.descriptor)
            self._opening[rank] = opening
            self._rank_at[opening.fileno()] = rank
            self._poll.register(opening.fileno(), select.EPOLLIN)

    def send(self, messages: Iterable[tuple[int, OutgoingMessage]]) -> None:
        """Send messages, each to its rank. Does not wait."""
        with self._turn:
            if self._closed:
                return
            self._enter()
            socket, ids, local = self._links.socket, self._ids, self._local
            for rank, message in messages:
                if rank in local:
                    packet = message.packet(self._memory)
                    if packet is not None:
                        with contextlib.suppress(OSError):  # it has many unread packets, or is gone
                            local[rank].write(packet)
                            continue
                self._look = True
                send(socket, ids[rank], SNDMORE)
                send_frames(socket, message.frames)
            if self._poller is not None:  # sending may have reset the descriptors of answers that another thread polls
                self._receive_over_zeromq()
            self._in_use = False

    def wait(self, ready: Callable[[], bool], seconds: float | None, awaited: Collection[int] = ()) -> bool:
        """Deliver answers until ``ready`` returns True; return False if that takes more than ``seconds``.

        Args:
            ready: whether to stop waiting. The hub's lock is held.
            seconds: with 0, deliver what has arrived.
            awaited: the ranks whose answers are missing. The thread then sleeps until the last of them has answered,
                or for a millisecond: every time that it wakes up costs as much as reading several answers.
        """
        end = None if seconds is None else time.monotonic() + seconds
        thread = threading.get_ident()
        slept = False
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
                    self._receive_all()
                    finished = ready() or self._closed
                    left = None if end is None else end - time.monotonic()
                    over = finished or (left is not None and left <= 0)
                    last = None if slept or over else self._last(awaited)
                    if not over and self._poller is None:
                        self._poller = thread
                    elif not over:
                        news = threading.Lock()
                        news.acquire()
                        self._sleeping.add(news)
                    self._in_use = False
                if over:
                    return finished
                slept = self._sleep(left, last, news)
        finally:
            self._leave(thread)

    def _sleep(self, left: float | None, last: select.poll | None, news: threading.Lock | None) -> bool:
        """Wait for news, of the thread that polls, or by polling; return whether only for the last answer."""
        if news is not None:
            news.acquire(timeout=LOOK_SECONDS if left is None else min(left, LOOK_SECONDS))
            return False
        if last is None:
            self._poll.poll(left)
            return False
        last.poll(1 if left is None else min(left * 1e3, 1))
        return True

    def _leave(self, thread: int) -> None:
        """Let another thread poll, if this one does; one that was interrupted here does so in its next ``wait``."""
        with self._turn:
            if self._poller == thread:
                self._poller = None
            if self._poller is None:
                self._wake_sleeping()

    def _poll_with(self, descriptor: int) -> select.poll:
        """Return what to poll for one local connection, and for all that is no local connection."""
        poll = select.poll()
        for each in (self._messages, self._events, self._wake, descriptor):
            poll.register(each, select.POLLIN)
        return poll

    def _last(self, ranks: Collection[int]) -> select.poll | None:
        """Return what to poll for the message of the last of these ranks that has a local connection, and ZeroMQ's."""
        last = next((rank for rank in reversed(self._local) if rank in ranks), None)
        return None if last is None else self._poll_for[last]

    def close(self) -> None:
        """Close all connections. Threads that wait return."""
        with self._turn:
            self._closed = True
            self._close_connections()
            if self._memory is not None:
                self._memory.close()
            self._wake_others()

    def __del__(self) -> None:
        self._close_connections()
        if self._memory is not None:
            self._memory.close()
        self._poll.close()
        os.close(self._wake)

    def _close_connections(self) -> None:
        self._links.close()
        for connections in (self._local, self._opening):
            while connections:
                connections.popitem()[1].close()

    def _receive_all(self) -> None:
        """Deliver what has arrived; the lock is held."""
        if self._look:
            self._receive_over_zeromq()
        for descriptor, _ in self._poll.poll(0):
            if self._closed:
                return
            if descriptor in self._rank_at:
                self._receive_locally(descriptor)
            elif descriptor == self._messages:
                self._receive_over_zeromq()
            elif descriptor == self._events:
                for link, established in self._links.events():
                    rank = self._ranks[link]
                    if established and rank in self._unopened:
                        self._open(rank, self._unopened.pop(rank))
                    self._changed(rank, established)
                self._wake_others()
            elif descriptor == self._wake and self._poller is None:  # else it is for the thread that polls
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)

    def _receive_over_zeromq(self) -> None:
        """Deliver what ZeroMQ has received; the lock is held.

        This also keeps its edge-triggered descriptor usable: after it, there is nothing that it has announced, until
        something is sent.
        """
        if self._closed:
            return
        self._look = False
        received = False
        for link, frames in self._links.receive():
            self._deliver(self._ranks[link], frames)
            received = True
        if received:
            self._wake_others()

    def _receive_locally(self, descriptor: int) -> None:
        """Deliver the next message of a local connection, or take the next step of opening it; the lock is held."""
        rank = self._rank_at[descriptor]
        try:
            if rank in self._local:
                frames = self._local[rank].receive()
                if frames is not None:
                    self._deliver(rank, frames)
                    self._wake_others()
            else:
                connection = self._opening[rank].advance()
                if connection is not None:
                    self._local[rank] = connection
                    self._poll_for[rank] = self._poll_with(descriptor)
                    del self._opening[rank]
        except (OSError, DataError) as error:
            self._close_local(descriptor, error)

    def _close_local(self, descriptor: int, reason: Exception) -> None:
        """Close a local connection: from now on, ZeroMQ has all messages of its rank; the lock is held."""
        rank = self._rank_at.pop(descriptor)
        if isinstance(reason, DataError):
            _logger.warning("the local connection to rank %d is closed: %s", rank, reason)
        self._poll.unregister(descriptor)
        if rank in self._local:
            self._local.pop(rank).close()
            del self._poll_for[rank]
            self._dropped(rank)
            self._wake_others()
        else:
            self._opening.pop(rank).close()

    def _wake_others(self) -> None:
        """Wake up the threads that sleep, and the one that polls; the lock is held."""
        self._wake_sleeping()
        if self._poller is not None:
            os.eventfd_write(self._wake, 1)

    def _wake_sleeping(self) -> None:
        while self._sleeping:
            self._sleeping.pop().release()
