"""Queries to worker processes while their main threads run calls: stacks, cancellation, kept results."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from mcontroller.channel.address import Address
from mcontroller.channel.links import Links, send_frames
from mcontroller.channel.messages import pack_query, unpack_reply
from mcontroller.errors import DataError


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


_local = threading.local()

_postponed: deque[tuple[Sequence[Address], str, tuple[Any, ...]]] = deque()


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
            self._poll.poll(None if left is None else left * 1e3)
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
                    send_frames(self._links.socket, [link, pack_query(number, name, arguments)])
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
            for other in [other for other, (_, taken) in self._connected.items() if taken == url]:
                self._forget(other)  # a process that has ended, whose port another has taken
            known = self._connected[address] = b"link%d" % next(self._connections), url  # ZeroMQ takes no id twice
            self._links.connect(*known, address)
        return known[0]

    def _received(self, waiting: dict[int, tuple[int, bytes]]) -> Iterator[tuple[int, Any, list[Any]]]:
        for _, frames in self._links.receive():
            number, value = unpack_reply(frames[0])
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
