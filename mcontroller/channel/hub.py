"""Hub: a controller's connections to all ranks of a group."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mcontroller.channel.address import Address
from mcontroller.channel.links import Links, send_frames

LOOK_SECONDS = 1.0
"""Seconds until a thread that waits for another one, which polls, looks itself: the other may have been interrupted."""


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
    def closed(self) -> bool:
        """Whether the hub was closed."""
        return self._closed

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
                    poll.poll(None if left is None else left * 1e3)
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
