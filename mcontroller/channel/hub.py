"""Hub: a controller's connections to all ranks of a group."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mcontroller.channel.address import Address
from mcontroller.channel.links import SNDMORE, Links, send

__all__ = ["Hub"]


class Hub:
    """Sends messages to ranks and delivers their answers, for any number of threads.

    There is no background thread: answers are delivered while some thread is in ``wait``. One waiting thread polls the
    sockets; the others sleep until it has delivered something, or leaves.

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
        self._ids: list[bytes] = []
        self._ranks: dict[bytes, int] = {}
        self._turn = threading.Condition(threading.Lock())
        self._sleeping = 0
        self._polling = self._woken = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._poll = select.poll()
        for descriptor in (*self._links.filenos, self._wake):
            self._poll.register(descriptor, select.POLLIN)
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the hub was closed."""
        return self._closed

    def connect(self, addresses: Iterable[Address]) -> None:
        """Connect to the endpoint of every rank, in the order of ranks."""
        with self._turn:
            for rank, address in enumerate(addresses):
                link = b"rank" + rank.to_bytes(4, "big")
                self._ids.append(link)
                self._ranks[link] = rank
                self._links.connect(link, address.calls, address)

    def send(self, messages: Iterable[tuple[int, Sequence[Any]]]) -> None:
        """Send messages, each to its rank: bytes, and ``zmq.Frame`` objects, which are not copied. Does not wait."""
        with self._turn:
            if self._closed:
                return
            socket, ids = self._links.socket, self._ids
            for rank, frames in messages:
                send(socket, ids[rank], SNDMORE)
                for frame in frames[:-1]:
                    send(socket, frame, SNDMORE, False)
                send(socket, frames[-1], 0, False)
            if self._polling:  # sending may have reset the descriptors of answers that another thread polls
                self._receive()

    def wait(self, ready: Callable[[], bool], seconds: float | None) -> bool:
        """Deliver answers until ``ready`` returns True; return False if that takes more than ``seconds``.

        With ``seconds`` of 0, deliver what has arrived.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            with self._turn:
                self._receive()
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
                    continue
                self._polling = True
            try:
                self._poll.poll(None if left is None else left * 1e3)
            finally:
                with self._turn:
                    self._polling = False
                    if self._woken:
                        self._woken = False
                        os.eventfd_read(self._wake)
                    self._wake_sleeping()

    def close(self) -> None:
        """Close all connections. Threads that wait return."""
        with self._turn:
            if not self._closed:
                self._closed = True
                self._links.close()
                self._notify()

    def __del__(self) -> None:
        self._links.close()
        os.close(self._wake)

    def _receive(self) -> None:
        """Deliver what has arrived; the lock is held.

        This also keeps the edge-triggered descriptors usable: after it, there is nothing that they have announced.
        """
        if self._closed:
            return
        received = False
        for link, frames in self._links.receive():
            self._deliver(self._ranks[link], frames)
            received = True
        for link, established in self._links.events():
            self._changed(self._ranks[link], established)
            received = True
        if received:
            self._notify()

    def _notify(self) -> None:
        self._wake_sleeping()
        if self._polling:
            self._woken = True
            os.eventfd_write(self._wake, 1)

    def _wake_sleeping(self) -> None:
        if self._sleeping:
            self._turn.notify_all()
