"""Endpoints on threads of the test's process, and a controller that collects their answers."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zmq

from mcontroller.channel.address import Address, ChannelKeys
from mcontroller.channel.endpoint import Endpoint
from mcontroller.channel.hub import Hub
from mcontroller.channel.messages import pack_call, unpack_answer

SECONDS = 30
"""More than anything here takes, on a machine under load."""


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
            body, *frames = respond([bytes(call.body), *(frame.bytes for frame in call.frames)])
            endpoint.answer(call, body, [zmq.Frame(frame) for frame in frames])

    threading.Thread(target=serve, daemon=True).start()
    return endpoint.address


def without_unix_socket(address: Address) -> Address:
    """The address as a process on another node sees it."""
    return replace(address, local_calls="")


def open_connection(url: str) -> socket.socket:
    """A plain connection to a ZeroMQ endpoint."""
    transport, _, place = url.partition("://")
    if transport == "tcp":
        host, _, port = place.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=SECONDS)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(SECONDS)
    connection.connect("\0" + place.removeprefix("@"))
    return connection


class Controller:
    """Sends calls to endpoints and keeps the answers by call and rank."""

    def __init__(self, addresses: list[Address], name: bytes | None = None) -> None:
        self.answers: dict[int, dict[int, list[bytes]]] = {}
        self.changes: list[tuple[int, bool]] = []
        self.hub = Hub(name or uuid.uuid4().hex.encode(), self._deliver, lambda *change: self.changes.append(change))
        self.hub.connect(addresses)
        self.ranks = range(len(addresses))

    def _deliver(self, rank: int, frames: list[Any]) -> None:
        number, body = unpack_answer(frames[0])
        self.answers.setdefault(number, {})[rank] = [bytes(body), *(frame.bytes for frame in frames[1:])]

    def send(self, number: int, body: bytes, *frames: Any, settled: int = 0) -> None:
        first = pack_call((number, settled, None), body)
        self.hub.send((rank, [first, *frames]) for rank in self.ranks)

    def result(self, number: int, seconds: float = SECONDS) -> dict[int, list[bytes]]:
        assert self.hub.wait(lambda: len(self.answers.get(number, ())) == len(self.ranks), seconds)
        return self.answers[number]

    def call(self, number: int, body: bytes, *frames: Any) -> dict[int, list[bytes]]:
        self.send(number, body, *frames)
        return self.result(number)
