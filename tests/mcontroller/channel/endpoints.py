"""Endpoints on threads of the test's process, and a controller that collects their answers."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mcontroller.channel.address import Address, ChannelKeys
from mcontroller.channel.controller import CallOrder, Hub
from mcontroller.channel.wire import CallHeader, pack_call, unpack_answer
from mcontroller.channel.worker import Endpoint

FOLDER = tempfile.mkdtemp(prefix="channel-")
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
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
    endpoint = Endpoint("127.0.0.1", keys, queries, ports, FOLDER, forget)

    def serve() -> None:
        while True:
            caller, header, data, received = endpoint.receive()
            body, *frames = respond([bytes(data), *map(bytes, received)])
            endpoint.answer(caller, header.number, body, frames)

    threading.Thread(target=serve, daemon=True).start()
    return endpoint.address


def elsewhere(address: Address) -> Address:
    """The address as a process on another node sees it."""
    return replace(address, folder="")


def open_connection(url: str) -> socket.socket:
    """A plain connection to a ZeroMQ endpoint."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


def cut_local_connections(address: Address) -> None:
    """Shut down the sockets of this process that are a side of a connection to this endpoint in its folder."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as side:
            names = f"{side.getpeername()} {side.getsockname()}"  # the listener has no peer
            if side.family == socket.AF_UNIX and address.name in names:
                side.shutdown(socket.SHUT_RDWR)


class Controller:
    """Sends calls to endpoints and keeps the answers by call and rank."""

    def __init__(self, addresses: list[Address], name: bytes | None = None) -> None:
        self.answers: dict[int, dict[int, list[bytes]]] = {}
        self.changes: list[tuple[int, bool]] = []
        changed: Callable[..., None] = lambda *change: self.changes.append(change)  # noqa: E731
        self.hub = Hub(name or uuid.uuid4().hex.encode(), self._deliver, changed)
        self.hub.connect(addresses)
        self.ranks = range(len(addresses))
        self._order = CallOrder()
        self._sent: dict[int, list[list[bytes]]] = {}

    def _deliver(self, rank: int, frames: list[Any]) -> None:
        number, _, _, data = unpack_answer(frames[0])
        self.answers.setdefault(number, {})[rank] = [bytes(data), *map(bytes, frames[1:])]

    def send(self, number: int, body: bytes, *frames: bytes, settled: int = 0) -> None:
        places = self._order.assign(self.hub.name, number, self.ranks)
        messages = self._sent[number] = [
            [pack_call(CallHeader(number, settled, place, None, "method"), body), *frames] for place in places
        ]
        self.hub.send(zip(self.ranks, messages, strict=True))

    def result(self, number: int, seconds: float = SECONDS) -> dict[int, list[bytes]]:
        assert self.hub.wait(lambda: len(self.answers.get(number, ())) == len(self.ranks), seconds)
        del self._sent[number]
        return self.answers[number]

    def call(self, number: int, body: bytes, *frames: bytes) -> dict[int, list[bytes]]:
        self.send(number, body, *frames)
        return self.result(number)
