"""Links: the connections of one process to many endpoints, through one ROUTER socket."""

from __future__ import annotations

import os
import select
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import zmq
from typing_extensions import Buffer
from zmq.utils.monitor import recv_monitor_message

from mcontroller.channel.address import Address

SILENT_SECONDS = 30
"""Time after which a connection to a node that vanished without closing it is lost."""

RECONNECT_MS = 50
"""Milliseconds until a lost connection is tried again."""

RECONNECT_MAX_MS = 1_000
"""Largest time between two tries; it doubles with each."""

RECONNECT_SECONDS = 30.0
"""Time in which a lost connection to a living process must be restored; otherwise its group ends."""

CONNECT_MS = 5_000
"""Timeout of a TCP connect in milliseconds."""

_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

_EVENTS, _POLLIN, _SNDMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.SNDMORE)
"""Plain integers: pyzmq's enumerations cost time at each use."""

_get: Any = zmq.backend.Socket.get
"""``zmq.Socket.get`` without the enumeration that it makes of the value."""

_send: Any = zmq.backend.Socket.send
"""``zmq.Socket.send`` without the options of draft sockets: socket, frame, flags, and whether to copy."""


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
        _get(self._monitor, _EVENTS)  # from now on, the descriptor announces events
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
        socket, recv = self.socket, self.socket.recv
        while _get(socket, _EVENTS) & _POLLIN:
            link: bytes = recv()
            yield link, receive_frames(recv)

    def events(self) -> Iterator[tuple[bytes, bool]]:
        """Yield what happened to connections: the link, and whether it was established (or lost, or not accepted)."""
        if not self._monitor_poll.poll(0):  # costs less than asking ZeroMQ
            return
        while _get(self._monitor, _EVENTS) & _POLLIN:
            event = recv_monitor_message(self._monitor)
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


def send_frames(socket: zmq.Socket[Any], frames: Sequence[Any]) -> None:
    """Send a message. Only small frames are copied, because bytes never change."""
    for frame in frames[:-1]:
        _send(socket, frame, _SNDMORE, False)
    _send(socket, frames[-1], 0, False)


def receive_frames(recv: Callable[..., Any]) -> list[Buffer]:
    """Return the frames of a message with the ``recv`` of its socket, in separate memory."""
    frame = recv(copy=False)
    frames = [frame.buffer]
    while frame.more:
        frame = recv(copy=False)
        frames.append(frame.buffer)
    return frames


def configure(socket: zmq.Socket[Any]) -> zmq.Socket[Any]:
    """Set what both sides of the channel have in common: no limit of queued messages, and what notices a lost node.

    The kernel probes connections, also to a frozen process. ZeroMQ's own heartbeats search all timers of a process
    for each reply: with 16,384 connections they took half of its thread's time.
    """
    socket.sndhwm = socket.rcvhwm = socket.linger = 0
    socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, 2
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = SILENT_SECONDS // 3
    socket.tcp_maxrt = SILENT_SECONDS * 1000  # for messages that were sent and not acknowledged
    return socket


def monitor(socket: zmq.Socket[Any], events: int) -> zmq.Socket[Any]:
    """Return a socket to read the events of another.

    Its queue has no limit: ZeroMQ's thread, which serves all connections, would wait for a reader of a full one.
    """
    url = f"inproc://events-{uuid.uuid4().hex}"
    socket.monitor(url, events)
    reader: zmq.Socket[Any] = socket.context.socket(zmq.PAIR)
    reader.rcvhwm = reader.linger = 0
    reader.connect(url)
    return reader


@cache
def _context(pid: int) -> zmq.Context[Any]:
    """Return the ZeroMQ context of this process's client sockets; a fork needs its own."""
    context: zmq.Context[Any] = zmq.Context()
    context.max_sockets = 65_000
    return context
