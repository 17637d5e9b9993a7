"""Endpoint: the side of a worker process. It receives calls on the main thread, and answers queries on another.

Calls of controllers on the same machine arrive over their local connections, which the thread of queries accepts, and
the main thread reads: see ``local_connection``.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import select
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import zmq
from typing_extensions import Buffer
from zmq.utils.monitor import recv_monitor_message

from mcontroller.channel.address import Address, ChannelKeys, endpoint_url, network_namespace
from mcontroller.channel.cancellation import Cancellation
from mcontroller.channel.links import configure, has_messages, monitor, receive_frames, send_frames
from mcontroller.channel.local_connection import LocalConnection, OutgoingMessage
from mcontroller.channel.local_listener import LocalListener
from mcontroller.channel.messages import pack_answer, pack_reply, unpack_call, unpack_query
from mcontroller.channel.order import MISSING_SECONDS, CallOrder, CallQueue
from mcontroller.channel.ports import reserve_port
from mcontroller.errors import DataError

__all__ = ["CONNECTIONS", "Endpoint", "ReceivedCall", "Reply"]

_logger = logging.getLogger(__name__)

CONNECTIONS = 4096
"""Open connections of one socket. More are closed at once, so that strangers cannot use up the descriptors."""

HANDSHAKE_MS = 5_000
"""Milliseconds in which a new connection must prove that it has the key."""

FRAME_BYTES = 1 << 30
"""Size of the largest frame that is accepted."""

WAIT_SECONDS = 0.2
"""Seconds between looks for a call that is missing in the order of several controllers."""

ESTABLISHED_SECONDS = 0.5
"""Seconds to wait for the connection over ZeroMQ of a controller that has a local connection."""

Reply = Callable[..., None]
"""Answers a query: called once, on any thread, with the value and optionally frames to send with it."""


@dataclass(slots=True)
class ReceivedCall:
    """A call, as it arrived.

    Attributes:
        caller: the controller.
        number: its number there.
        body: the content of the first frame.
        frames: the other frames, in memory of their own.
    """

    caller: bytes
    number: int
    body: memoryview
    frames: list[Buffer]


class Endpoint:
    """Receives the calls of controllers and answers their queries, until the process ends.

    If a call arrives twice, because its connection was lost, its answer is sent again. See ``messages`` for the frames.

    Args:
        host: the address of this machine, as other machines know it.
        keys: the keys of the group.
        queries: a function for each query; it gets a ``Reply`` and the arguments of the query, and runs on a thread.
        ports: the first and the last port to listen on; None for any.
        forget: called with a controller that has ended, when another one calls; its answers have been dropped.

    Attributes:
        query_thread: the operating system's id of the thread that answers queries.

    Raises:
        OSError: no port is free.
    """

    def __init__(
        self,
        host: str,
        keys: ChannelKeys,
        queries: Mapping[str, Callable[..., None]],
        ports: tuple[int, int] | None = None,
        forget: Callable[[bytes], None] = lambda caller: None,
    ) -> None:
        self.cancellation = Cancellation()
        self.order = CallOrder()
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.max_sockets = 65_000
        authenticator = _Authenticator(self._context, keys.client.public)
        self._calls = _bound(self._context, keys)
        self._calls.router_mandatory = True  # sending to a controller that is not connected raises
        self._queries = _bound(self._context, keys)
        monitors = [monitor(each, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED) for each in self._sockets]
        call_port, query_port = (_listen(each, host, ports) for each in self._sockets)
        self._opened: SimpleQueue[tuple[bytes, LocalConnection]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._local: dict[bytes, LocalConnection] = {}
        self._caller_at: dict[int, bytes] = {}
        self._look = True  # whether calls may have arrived that the descriptor does not announce: after sending
        self._calls_at = self._calls.fileno()
        self._poll = select.epoll()
        for descriptor in (self._calls_at, self._wake):
            self._poll.register(descriptor, select.EPOLLIN)
        listener = _listen_locally(keys.client.secret, self._opened_locally)
        server_key, client = keys.server.public, keys.client
        name, namespace = ("", "") if listener is None else (listener.name, network_namespace(os.getpid()))
        self.address = Address(host, call_port, query_port, server_key, client, name, namespace)
        self._queue: CallQueue[ReceivedCall] = CallQueue()
        self._answers: dict[bytes, OrderedDict[int, OutgoingMessage]] = {}
        self._forget = forget
        self._unreachable: dict[bytes, float] = {}
        own = {
            "prepare": lambda reply, *call: reply(self.cancellation.prepare(*call)),
            "commit": self._commit,
            "place": lambda reply, *call: reply(self.order.assign(*call)),
        }
        server = _QueryServer(self._queries, {**own, **queries}, authenticator, monitors, listener)
        queries_thread = threading.Thread(target=server.serve, name="channel queries", daemon=True)
        queries_thread.start()
        self.query_thread = queries_thread.native_id or 0

    @property
    def _sockets(self) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
        return self._calls, self._queries

    def receive(self) -> ReceivedCall:
        """Wait for the next call in order and return it. Called by the main thread.

        A message that is not a call is dropped and logged.
        """
        while True:
            call = self._queue.next()
            if call is not None:
                return call
            for caller, frames in self._arrived():
                self._add(caller, frames)

    def _arrived(self) -> Iterator[tuple[bytes, list[Buffer]]]:
        """Wait, and yield the callers and the frames of messages: one of ZeroMQ's, or one of each local connection."""
        if self._look:
            self._look = has_messages(self._calls)
            if self._look:
                yield self._calls.recv(), receive_frames(self._calls.recv)
                return
        for descriptor, _ in self._poll.poll(WAIT_SECONDS if self._queue.waiting else None):
            if descriptor == self._calls_at:
                self._look = True
            elif descriptor == self._wake:
                self._add_local()
            elif descriptor in self._caller_at:
                caller = self._caller_at[descriptor]
                try:
                    frames = self._local[caller].receive()
                except (OSError, DataError) as error:
                    self._close_local(descriptor, error)
                    continue
                if frames is not None:
                    yield caller, frames

    def _add(self, caller: bytes, frames: list[Buffer]) -> None:
        try:
            (number, settled, after), body = unpack_call(frames.pop(0))
        except DataError as error:
            _logger.warning("dropped a message of controller %r: %s", caller, error)
            return
        if caller not in self._answers:
            self._look_for_unreachable()
        if self._unreachable:
            self._drop_unreachable()
        self._drop_answers(caller, settled)
        if not self._queue.add(caller, number, after, ReceivedCall(caller, number, body, frames)):
            self._answer_again(caller, number)

    def answer(self, call: ReceivedCall, body: bytes, frames: Sequence[bytes] = ()) -> None:
        """Send the answer of a call."""
        message = OutgoingMessage([pack_answer(call.number, body), *frames])
        self._answers.setdefault(call.caller, OrderedDict())[call.number] = message
        self._send(call.caller, message)

    def _opened_locally(self, caller: bytes, connection: LocalConnection) -> None:
        """Pass a connection to the main thread; called on the thread of queries."""
        self._opened.put((caller, connection))
        os.eventfd_write(self._wake, 1)

    def _add_local(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._opened.empty():
            caller, connection = self._opened.get()
            if caller in self._local:
                self._close_local(self._local[caller].fileno())
            self._local[caller] = connection
            self._caller_at[connection.fileno()] = caller
            self._poll.register(connection.fileno(), select.EPOLLIN)

    def _close_local(self, descriptor: int, reason: Exception | None = None) -> None:
        """Close a local connection. Its controller sends again what was not answered, over ZeroMQ."""
        caller = self._caller_at.pop(descriptor)
        if isinstance(reason, DataError):
            _logger.warning("the local connection of controller %r is closed: %s", caller, reason)
        self._poll.unregister(descriptor)
        self._local.pop(caller).close()

    def _commit(self, reply: Reply, caller: bytes, number: int, cancelled: bool) -> None:
        self.cancellation.commit(caller, number, cancelled)
        reply(None)

    def _answer_again(self, caller: bytes, number: int) -> None:
        if number in self._answers.get(caller, ()):  # else it has not run yet
            self._send(caller, self._answers[caller][number])

    def _send(self, caller: bytes, message: OutgoingMessage) -> bool:
        """Send an answer; return False if its controller is not connected, which asks again if it lives.

        If only its connection over ZeroMQ is missing, wait a little for it: it was established before the local one,
        as the controller saw it.
        """
        seconds = 0.0
        if caller in self._local:
            packet, seconds = message.packet(None), ESTABLISHED_SECONDS
            try:
                if packet is not None:
                    self._local[caller].write(packet)
                    return True
            except ConnectionError:
                seconds = 0.0
            except OSError:  # the controller has many unread packets
                pass
        self._look = True
        end = time.monotonic() + seconds
        while True:
            try:
                send_frames(self._calls, [caller, *message.frames])
                return True
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
            if time.monotonic() >= end:
                return False
            time.sleep(0.001)

    def _look_for_unreachable(self) -> None:
        """Note the controllers that are not connected now. Sending an answer again is harmless."""
        for caller, answers in self._answers.items():
            if answers and not self._send(caller, next(iter(answers.values()))):
                self._unreachable.setdefault(caller, time.monotonic())

    def _drop_unreachable(self) -> None:
        """Drop what is kept for controllers that have not connected again for longer than a living one takes."""
        for caller, since in tuple(self._unreachable.items()):
            if time.monotonic() - since > MISSING_SECONDS:
                del self._unreachable[caller]
                answers = self._answers[caller]
                if answers and not self._send(caller, next(iter(answers.values()))):
                    del self._answers[caller]
                    self._forget(caller)

    def _drop_answers(self, caller: bytes, settled: int) -> None:
        answers = self._answers.get(caller)
        while answers and next(iter(answers)) < settled:
            answers.popitem(last=False)


class _QueryServer:
    """Answers queries, accepts local connections, checks keys and bounds the number of connections, on one thread."""

    def __init__(
        self,
        sock: zmq.Socket[Any],
        handlers: Mapping[str, Callable[..., None]],
        authenticator: _Authenticator,
        monitors: Sequence[zmq.Socket[Any]],
        listener: LocalListener | None,
    ) -> None:
        self._socket = sock
        self._listener = listener
        self._handlers = handlers
        self._authenticator = authenticator
        self._connections = {monitor: _Connections() for monitor in monitors}
        self._replies: SimpleQueue[tuple[bytes, bytes, Sequence[Any]]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)

    def serve(self) -> None:
        """Answer until the process ends."""
        poller = zmq.Poller()
        for each in (self._socket, self._authenticator.socket, *self._connections, self._wake):
            poller.register(each, zmq.POLLIN)
        if self._listener is not None:
            poller.register(self._listener.fileno(), zmq.POLLIN)
        while True:
            seconds = None if self._listener is None else self._listener.seconds
            readable = poller.poll(None if seconds is None else round(seconds * 1e3))
            if self._listener is not None:
                self._listener.serve()
            for ready, _ in readable:
                if ready is self._socket:
                    client, *frames = self._socket.recv_multipart()
                    self._handle(client, b"".join(frames))
                elif ready is self._authenticator.socket:
                    self._authenticator.answer()
                elif ready == self._wake:
                    self._send_replies()
                elif ready in self._connections:
                    self._connections[ready].note(recv_monitor_message(ready))

    def _handle(self, client: bytes, query: bytes) -> None:
        """Answer a query; a malformed one gets a `DataError`, or is dropped and logged if it has no number."""
        try:
            number, name, arguments = unpack_query(query)
        except DataError as error:
            _logger.warning("dropped a query of %r: %s", client, error)
            return

        def reply(value: Any, frames: Sequence[Any] = ()) -> None:
            if number:
                self._replies.put((client, pack_reply(number, value), frames))
                os.eventfd_write(self._wake, 1)

        try:
            self._handlers[name](reply, *arguments)
        except Exception as error:
            failed = DataError(f"the query {name!r} with {arguments!r} failed: {type(error).__name__}: {error}")
            _logger.warning("%s", failed)
            reply(failed)

    def _send_replies(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._replies.empty():
            client, head, frames = self._replies.get()
            send_frames(self._socket, [client, head, *frames])


class _Authenticator:
    """Answers ZeroMQ's question whether a client has the key (ZAP, RFC 27)."""

    def __init__(self, context: zmq.Context[Any], allowed: bytes) -> None:
        from zmq.utils.z85 import decode

        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self._allowed = decode(allowed)

    def answer(self) -> None:
        """Answer one question."""
        sender, _, version, request, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
        known = mechanism == b"CURVE" and hmac.compare_digest(credentials[0], self._allowed)
        verdict = (b"200", b"OK") if known else (b"400", b"not the key of the group")
        self.socket.send_multipart([sender, b"", version, request, *verdict, b"", b""])


class _Connections:
    """The open connections of a socket. It shuts down those that are too many."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def note(self, event: Mapping[str, Any]) -> None:
        """Note an event of the socket's monitor."""
        descriptor = event["value"]
        if event["event"] == zmq.EVENT_DISCONNECTED:
            self._open.discard(descriptor)
        elif len(self._open) < CONNECTIONS:
            self._open.add(descriptor)
        else:
            _shut_down(descriptor, event["endpoint"].decode())


def _shut_down(descriptor: int, endpoint: str) -> None:
    """Shut down a connection to this endpoint; ZeroMQ then closes it. The descriptor may belong to another by now."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if endpoint.endswith(f":{connection.getsockname()[1]}"):
            connection.shutdown(socket.SHUT_RDWR)


def _bound(context: zmq.Context[Any], keys: ChannelKeys) -> zmq.Socket[Any]:
    sock = configure(context.socket(zmq.ROUTER))
    sock.router_handover = True  # a controller that connects again replaces its lost connection
    sock.handshake_ivl = HANDSHAKE_MS
    sock.maxmsgsize = FRAME_BYTES
    sock.zap_domain = b"mcontroller"
    sock.curve_server, sock.curve_secretkey = True, keys.server.secret
    return sock


def _listen(sock: zmq.Socket[Any], host: str, ports: tuple[int, int] | None) -> int:
    """Bind to the address that peers use; if none of the interfaces has it (behind a NAT), to all of them."""
    sock.ipv6 = ":" in host
    try:
        return _bind(sock, host, host, ports)
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.EADDRNOTAVAIL):
            raise
    return _bind(sock, "*", "", ports)


def _listen_locally(key: bytes, accepted: Callable[[bytes, LocalConnection], None]) -> LocalListener | None:
    """Return a listener for controllers on the same machine; None if the system has no such sockets."""
    try:
        return LocalListener(key, CONNECTIONS, accepted) if network_namespace(os.getpid()) else None
    except OSError:
        return None


def _bind(sock: zmq.Socket[Any], interface: str, host: str, ports: tuple[int, int] | None) -> int:
    """Bind to a port of the range that no other process holds."""
    with reserve_port(host, ports) as reserved:
        port: int = reserved.getsockname()[1]
        sock.bind(endpoint_url(interface, port))
    return port
