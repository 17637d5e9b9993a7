"""Endpoints on threads of the test's process, and a controller that collects their answers."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mcontroller.channel.address import Address, ChannelKeys
from mcontroller.channel.endpoint import Endpoint
from mcontroller.channel.hub import Hub
from mcontroller.channel.local_connection import OutgoingMessage
from mcontroller.channel.messages import pack_call, unpack_answer
from mcontroller.channel.order import CallOrder

SECONDS = 30
"""More than any of these tests takes, on a machine under load."""


def start_endpoint(
    keys: ChannelKeys,
    respond: Callable[[list[bytes]], list[bytes]] = list,
    ports: tuple[int, int] | None = None,
    forget: Callable[[bytes], None] = lambda caller: None,
) -> Address:
    """An endpoint whose "main thread" answers each call with what ``respond`` makes of its frames."""
    queries = {"double": lambda reply, number: reply(2 * number), "silent": lambda reply: None}
    endpoint = Endpoint("127.0.0.1", keys, queries, ports, forget)

    def serve() -> None:
        while True:
            call = endpoint.receive()
            body, *frames = respond([bytes(call.body), *map(bytes, call.frames)])
            endpoint.answer(call, body, frames)

    threading.Thread(target=serve, daemon=True).start()
    return endpoint.address


def elsewhere(address: Address) -> Address:
    """The address as a process on another node sees it."""
    return replace(address, local="")


def open_connection(url: str) -> socket.socket:
    """A plain connection to a ZeroMQ endpoint."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


def open_local_connection(address: Address) -> socket.socket:
    """A plain connection to the listener of local connections."""
    return connect_locally(address.local)


def connect_locally(name: str) -> socket.socket:
    """A plain connection to the listener of this name."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(SECONDS)
    connection.connect(f"\0{name}")
    return connection


def cut_local_connections(address: Address) -> None:
    """Shut down the sockets of this process that are a side of a local connection to this endpoint."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as side:
            names = (side.getsockname(), side.getpeername())
            if side.family == socket.AF_UNIX and f"\0{address.local}".encode() in names:
                side.shutdown(socket.SHUT_RDWR)


class Controller:
    """Sends calls to endpoints and keeps the answers by call and rank."""

    def __init__(self, addresses: list[Address], name: bytes | None = None) -> None:
        self.answers: dict[int, dict[int, list[bytes]]] = {}
        self.changes: list[tuple[int, bool]] = []
        self.dropped: list[int] = []
        changed: Callable[..., None] = lambda *change: self.changes.append(change)  # noqa: E731
        self.hub = Hub(name or uuid.uuid4().hex.encode(), self._deliver, changed, self.dropped.append)
        self.hub.connect(addresses)
        self.ranks = range(len(addresses))
        self.local = sum(address.is_local for address in addresses)
        self._order = CallOrder()
        self._sent: dict[int, list[OutgoingMessage]] = {}

    def _deliver(self, rank: int, frames: list[Any]) -> None:
        number, body = unpack_answer(frames[0])
        self.answers.setdefault(number, {})[rank] = [bytes(body), *map(bytes, frames[1:])]

    def open_local_connections(self) -> Controller:
        """Wait until messages to endpoints of this machine go over local connections."""
        assert self.hub.wait(lambda: self.hub.local_ranks == self.local, SECONDS)
        return self

    def send(self, number: int, body: bytes, *frames: bytes, settled: int = 0) -> None:
        places = self._order.assign(self.hub.name, number, self.ranks)
        messages = self._sent[number] = [
            OutgoingMessage([pack_call((number, settled, place), body), *frames]) for place in places
        ]
        self.hub.send(zip(self.ranks, messages, strict=True))

    def result(self, number: int, seconds: float = SECONDS) -> dict[int, list[bytes]]:
        assert self.hub.wait(lambda: len(self.answers.get(number, ())) == len(self.ranks), seconds)
        del self._sent[number]
        return self.answers[number]

    def call(self, number: int, body: bytes, *frames: bytes) -> dict[int, list[bytes]]:
        self.send(number, body, *frames)
        return self.result(number)
