"""QueryServer: the sockets that a process listens on, and the thread that answers queries.

Each socket listens at two places: in a folder that only this user can enter, for processes of this user on the same
machine, and on a TCP port, where CURVE proves that a client has the key of the group, and encrypts. Nothing that a
stranger sends is read by this project.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import pickle
import random
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import zmq
from zmq.utils.z85 import decode

from mcontroller.channel.address import Address, ChannelKeys, endpoint_url, private_folder
from mcontroller.channel.wire import configure, send_frames
from mcontroller.errors import DataError
from mcontroller.machine import boot_id

_logger = logging.getLogger(__name__)

HANDSHAKE_MS = 5_000
"""Milliseconds in which a new connection must prove that it has the key."""

FRAME_BYTES = 1 << 30
"""Size of the largest frame that is accepted."""

Reply = Callable[..., None]
"""Answers a query: called once, on any thread, with the value and optionally frames to send with it."""


class QueryServer:
    """Answers queries on a thread, from ``start`` until the process ends.

    Args:
        host: the address of this machine, as other machines know it.
        keys: the keys of the group.
        ports: the first and the last port to listen on; None for any.
        folder: the folder for sockets, made if it does not exist; None for none. If others can enter it, it is not
            used.

    Attributes:
        address: the address of this process, once ``start`` was called.
    """

    def __init__(
        self, host: str, keys: ChannelKeys, ports: tuple[int, int] | None = None, folder: str | None = None
    ) -> None:
        self._host, self._keys, self._ports = host, keys, ports
        if folder is not None:
            with contextlib.suppress(OSError):
                os.mkdir(folder, mode=0o700)
        usable = None if folder is None else private_folder(folder)
        self._folder = folder if folder and usable else ""
        self._path = f"{usable}/{secrets.token_hex(8)}" if usable else ""
        self._allowed = decode(keys.client.public)
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.max_sockets = 65_000
        self._authenticator = self._context.socket(zmq.ROUTER)
        self._authenticator.bind("inproc://zeromq.zap.01")
        self._replies: SimpleQueue[tuple[bytes, bytes, Sequence[Any]]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.address: Address

    def listen(self, kind: str) -> tuple[zmq.Socket[Any], int]:
        """Return a socket that listens, and its port.

        Raises:
            OSError: no port is free.
        """
        sock = configure(self._context.socket(zmq.ROUTER))
        sock.router_handover = True  # a controller that connects again replaces its lost connection
        sock.handshake_ivl = HANDSHAKE_MS
        sock.maxmsgsize = FRAME_BYTES
        if self._path:  # before CURVE is set, which is for sockets that are bound later
            try:
                sock.bind(f"ipc://{self._path}.{kind}")
            except zmq.ZMQError:
                self._folder = self._path = ""
        sock.zap_domain = b"mcontroller"
        sock.curve_server, sock.curve_secretkey = True, self._keys.server.secret
        return sock, _bind_to_host(sock, self._host, self._ports)

    def start(self, handlers: Mapping[str, Callable[..., None]], call_port: int = 0) -> None:
        """Answer queries from now on.

        Args:
            handlers: a function for each query; it gets a ``Reply`` and the arguments of the query.
            call_port: the port of the socket for calls, if there is one.
        """
        self._socket, query_port = self.listen("queries")
        self._handlers = handlers
        self.address = Address(
            self._host,
            call_port,
            query_port,
            self._keys.server.public,
            self._keys.client,
            self._folder,
            os.path.basename(self._path),
            boot_id() if self._path else "",
        )
        threading.Thread(target=self._serve, name="channel queries", daemon=True).start()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for readable in (self._socket, self._authenticator, self._wake):
            poller.register(readable, zmq.POLLIN)
        while True:
            for ready, _ in poller.poll():
                if ready is self._socket:
                    client, *frames = self._socket.recv_multipart()
                    self._handle(client, b"".join(frames))
                elif ready is self._authenticator:
                    self._authenticate()
                elif ready == self._wake:
                    self._send_replies()

    def _handle(self, client: bytes, query: bytes) -> None:
        """Answer a query, with a `DataError` if its handler raises."""
        number, name, arguments = pickle.loads(query)

        def reply(value: Any, frames: Sequence[Any] = ()) -> None:
            if number:
                self._replies.put((client, pickle.dumps((number, value)), frames))
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

    def _authenticate(self) -> None:
        """Answer ZeroMQ's question whether a client has the key (ZAP, RFC 27)."""
        sender, _, version, request, _, _, _, mechanism, *credentials = self._authenticator.recv_multipart()
        known = mechanism == b"CURVE" and hmac.compare_digest(credentials[0], self._allowed)
        verdict = (b"200", b"OK") if known else (b"400", b"not the key of the group")
        self._authenticator.send_multipart([sender, b"", version, request, *verdict, b"", b""])


def _bind_to_host(sock: zmq.Socket[Any], host: str, ports: tuple[int, int] | None) -> int:
    """Bind to the address that peers use; if none of the interfaces has it (behind a NAT), to all of them."""
    sock.ipv6 = ":" in host
    try:
        return _bind(sock, host, host, ports)
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.EADDRNOTAVAIL):
            raise
    return _bind(sock, "*", "", ports)


def _bind(sock: zmq.Socket[Any], interface: str, host: str, ports: tuple[int, int] | None) -> int:
    """Bind to a port of the range that no other process holds."""
    with reserve_port(host, ports) as reserved:
        port: int = reserved.getsockname()[1]
        sock.bind(endpoint_url(interface, port))
    return port


def reserve_port(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """Return a socket that holds a free port, which it never listens on.

    The port is taken without SO_REUSEADDR, so that no other process holds it, and the option is set afterwards: ZeroMQ
    and torch's store, which set it too, can bind to the port while the socket holds it. The kernel does not assign the
    port to a process that asks for any free one, and no other reservation gets it.

    Args:
        host: an address of this machine; empty for all of them.
        ports: the first and the last port that may be taken; None for any.

    Raises:
        OSError: no port of the range is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = ports or (0, 0)
    candidates = list(range(first, last + 1))
    start = random.randrange(len(candidates))  # the processes of a node begin at different ports
    for port in candidates[start:] + candidates[:start]:
        reserved = socket.socket(family, socket.SOCK_STREAM)
        try:
            reserved.bind((host, port))
        except OSError as error:
            reserved.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return reserved
    raise OSError(
        f"no free port from {first} to {last} on {host or 'this node'} for a worker process: allow more ports"
    )
