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


class Hub:
    """Sends messages to ranks and delivers their answers, for any number of threads.

    There is no background thread: answers are delivered while some thread is in ``wait``. One waiting thread polls the
    sockets; the others sleep until it has delivered something, or leaves.

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
        self._ids: list[bytes] = []
        self._ranks: dict[bytes, int] = {}
        self._turn = threading.Condition(threading.Lock())
        self._sleeping = 0
        self._polling = self._woken = False
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
        """Connect to the endpoint of every rank, in the order of ranks."""
        with self._turn:
            for rank, address in enumerate(addresses):
                link = b"rank" + rank.to_bytes(4, "big")
                self._ids.append(link)
                self._ranks[link] = rank
                self._links.connect(link, address.calls, address)
                if address.is_local:
                    self._unopened[rank] = address

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
            if self._polling:  # sending may have reset the descriptors of answers that another thread polls
                self._receive_over_zeromq()

    def wait(self, ready: Callable[[], bool], seconds: float | None, awaited: Collection[int] = ()) -> bool:
        """Deliver answers until ``ready`` returns True; return False if that takes more than ``seconds``.

        Args:
            ready: whether to stop waiting. The hub's lock is held.
            seconds: with 0, deliver what has arrived.
            awaited: the ranks whose answers are missing. The thread then sleeps until the last of them has answered,
                or for a millisecond: every time that it wakes up costs as much as reading several answers.
        """
        end = None if seconds is None else time.monotonic() + seconds
        readable: list[tuple[int, int]] | None = None
        slept = False
        while True:
            with self._turn:
                if self._look:
                    self._receive_over_zeromq()
                if readable is None:
                    readable = self._poll.poll(0)
                self._receive(readable)
                if ready() or self._closed:
                    return True
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if self._polling:
                    self._sleeping += 1
                    try:
                        self._turn.wait(left)
                    finally:
                        self._sleeping -= 1
                    readable = None
                    continue
                self._polling = True
                last = None if slept else self._last(awaited)
            try:
                if last is None:
                    readable, slept = self._poll.poll(left), False
                else:
                    last.poll(1 if left is None else min(left * 1e3, 1))
                    readable, slept = None, True
            finally:
                with self._turn:
                    self._polling = False
                    if self._woken:
                        self._woken = False
                        os.eventfd_read(self._wake)
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
            if not self._closed:
                self._closed = True
                self._close_connections()
                self._notify()

    def __del__(self) -> None:
        self._close_connections()
        self._poll.close()
        os.close(self._wake)

    def _close_connections(self) -> None:
        self._links.close()
        for connections in (self._local, self._opening):
            while connections:
                connections.popitem()[1].close()
        if self._memory is not None:
            self._memory.close()

    def _receive(self, readable: Iterable[tuple[int, int]]) -> None:
        """Deliver what has arrived at descriptors; the lock is held."""
        for descriptor, _ in readable:
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
                self._notify()

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
            self._notify()

    def _receive_locally(self, descriptor: int) -> None:
        """Deliver the next message of a local connection, or take the next step of opening it; the lock is held."""
        rank = self._rank_at[descriptor]
        try:
            if rank in self._local:
                frames = self._local[rank].receive()
                if frames is not None:
                    self._deliver(rank, frames)
                    self._notify()
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
            self._notify()
        else:
            self._opening.pop(rank).close()

    def _notify(self) -> None:
        self._wake_sleeping()
        if self._polling:
            self._woken = True
            os.eventfd_write(self._wake, 1)

    def _wake_sleeping(self) -> None:
        if self._sleeping:
            self._turn.notify_all()
