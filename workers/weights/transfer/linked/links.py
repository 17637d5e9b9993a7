"""Connections between two ranks for the small messages around a bucket: it is ready, it was read.

A connection that ends reports a process that died at once; one that is silent until the deadline reports a hang.

Both sides prove that they have the key of the listener, as those of local connections of calls do (see
``local_listener``): the listener sends a number that is used once, the other side a number, its rank and a code of all
three, and the listener another code. Until then, each reads a fixed number of bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from mcontroller.channel.local_listener import PROOF_SECONDS, UNPROVEN, proof
from workers.weights.transfer.errors import PeerLost
from workers.weights.transfer.transport import Deadline

__all__ = ["Link", "Listener", "ListenerAddress", "connected"]

MESSAGE_BYTES = 1 << 20
"""Longest message: the weights themselves travel elsewhere."""

_KEY_BYTES = _ONCE_BYTES = _CODE_BYTES = 32
_NUMBER_BYTES = 8
_PROOF_BYTES = _ONCE_BYTES + _NUMBER_BYTES + _CODE_BYTES
_LISTENER, _PEER = b"weights listener", b"weights peer"


class ListenerAddress(NamedTuple):
    """The address of a listener.

    Attributes:
        endpoint: a path of a Unix socket, or a host and a port.
        key: is never sent over the connection; both sides prove that they have it.
    """

    endpoint: str | tuple[str, int]
    key: bytes


class Link:
    """A connection to one rank of the other group.

    Args:
        connection: a connected stream socket.
        peer: the rank at the other end.
    """

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self.connection = connection
        self.peer = peer

    def send(self, message: bytes, deadline: Deadline, descriptors: Collection[int] = ()) -> None:
        """Send a message, and file descriptors over a Unix socket.

        Raises:
            PeerLost: the connection has ended, or the message was not read in time.
        """
        framed = len(message).to_bytes(_NUMBER_BYTES) + message
        try:
            self.connection.settimeout(deadline.left(self.peer))
            if descriptors:
                sent = socket.send_fds(self.connection, [framed], list(descriptors))
                framed = framed[sent:]
            self.connection.sendall(framed)
        except OSError as error:
            raise self._lost(error, deadline) from error

    def receive(self, deadline: Deadline, descriptors: int = 0) -> tuple[bytes, list[int]]:
        """Return the next message, and up to so many file descriptors that came with it.

        Raises:
            PeerLost: the connection has ended, there was no message in time, or it has more than ``MESSAGE_BYTES``.
        """
        head, found = self.receive_exactly(_NUMBER_BYTES, deadline, descriptors)
        length = int.from_bytes(head)
        if length > MESSAGE_BYTES:
            raise self._lost(OSError(f"a message of {length} bytes; at most {MESSAGE_BYTES} are accepted"), deadline)
        return self.receive_exactly(length, deadline)[0], found

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def receive_exactly(self, count: int, deadline: Deadline, descriptors: int = 0) -> tuple[bytes, list[int]]:
        """Return so many bytes, and file descriptors; see ``receive``."""
        parts, found = bytearray(), list[int]()
        while len(parts) < count:
            try:
                self.connection.settimeout(deadline.left(self.peer))
                part, received, _, _ = socket.recv_fds(self.connection, count - len(parts), descriptors)
            except OSError as error:
                raise self._lost(error, deadline) from error
            if not part:
                raise self._lost(ConnectionResetError("its process ended, or it closed the transfer"), deadline)
            found += received
            parts += part
        return bytes(parts), found

    def _lost(self, error: OSError, deadline: Deadline) -> PeerLost:
        late = isinstance(error, TimeoutError)
        cause = f"no answer within {deadline.seconds:g} s" if late else f"connection lost: {error}"
        return PeerLost(f"rank {self.peer} of the transfer: {cause}", peer=self.peer, cause=cause)


@dataclass
class _Unproven:
    """A connection to a listener that has not proven yet that it has the key."""

    connection: socket.socket
    once: bytes = field(default_factory=lambda: secrets.token_bytes(_ONCE_BYTES))
    received: bytes = b""
    opened: float = field(default_factory=time.monotonic)


class Listener:
    """Waits for connections of the peers.

    Args:
        host: the address of this node for other nodes; None for a Unix socket, in a directory that only this user
            can read.
    """

    def __init__(self, host: str | None = None) -> None:
        self._directory: str | None = None
        if host is None:
            self._directory = tempfile.mkdtemp(prefix="weights-")
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(os.path.join(self._directory, "socket"))
        else:
            self._socket = socket.create_server((host, 0))
        self._socket.listen(1024)
        self._socket.setblocking(False)
        endpoint = self._socket.getsockname()
        self.address = ListenerAddress(
            endpoint if host is None else (host, endpoint[1]), secrets.token_bytes(_KEY_BYTES)
        )
        self._unproven: dict[int, _Unproven] = {}

    def accept(self, peers: Collection[int], deadline: Deadline) -> dict[int, Link]:
        """Return the connections of all ``peers``, and stop listening. Others cost nothing but their descriptors.

        Raises:
            PeerLost: a peer has not connected in time.
        """
        links: dict[int, Link] = {}
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                while missing := sorted(set(peers) - links.keys()):
                    for key, _ in selector.select(min(deadline.left(missing[0]), PROOF_SECONDS)):
                        if key.fileobj is self._socket:
                            self._greet(selector, UNPROVEN + len(peers))
                        elif link := self._proven(selector, key.fd, missing):
                            links[link.peer] = link
                    for late in [each for each in self._unproven.values() if _is_late(each)]:
                        self._drop(selector, late)
        finally:
            self.close()
        return links

    def close(self) -> None:
        """Stop listening, close what has not proven that it has the key, and remove the socket's file."""
        self._socket.close()
        for each in self._unproven.values():
            each.connection.close()
        self._unproven = {}
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _greet(self, selector: selectors.BaseSelector, most: int) -> None:
        """Accept a connection and send it a number; close the oldest unproven one if there are ``most``."""
        with contextlib.suppress(OSError):  # it is gone already
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            if len(self._unproven) >= most:
                self._drop(selector, next(iter(self._unproven.values())))
            unproven = self._unproven[connection.fileno()] = _Unproven(connection)
            selector.register(connection, selectors.EVENT_READ)
            connection.send(unproven.once)

    def _proven(self, selector: selectors.BaseSelector, descriptor: int, missing: Collection[int]) -> Link | None:
        """Read from a connection; return the link of a missing rank that has proven that it has the key."""
        unproven = self._unproven.get(descriptor)
        if unproven is None:
            return None
        with contextlib.suppress(OSError):
            try:
                part = unproven.connection.recv(_PROOF_BYTES - len(unproven.received))
            except BlockingIOError:  # the event was of a closed connection that had this descriptor
                return None
            unproven.received += part
            if part and len(unproven.received) < _PROOF_BYTES:
                return None
            once, caller = unproven.received[:_ONCE_BYTES], unproven.received[_ONCE_BYTES:-_CODE_BYTES]
            rank, code = int.from_bytes(caller), unproven.received[-_CODE_BYTES:]
            bound = (_name(self.address), unproven.once + once, caller)
            if hmac.compare_digest(code, proof(self.address.key, _PEER, *bound)) and rank in missing:
                unproven.connection.send(proof(self.address.key, _LISTENER, *bound))
                selector.unregister(unproven.connection)
                return Link(self._unproven.pop(descriptor).connection, rank)
        self._drop(selector, unproven)
        return None

    def _drop(self, selector: selectors.BaseSelector, unproven: _Unproven) -> None:
        selector.unregister(unproven.connection)
        del self._unproven[unproven.connection.fileno()]
        unproven.connection.close()


def _is_late(unproven: _Unproven) -> bool:
    return time.monotonic() - unproven.opened > PROOF_SECONDS


def _name(address: ListenerAddress) -> str:
    return str(address.endpoint)


def connected(address: ListenerAddress, rank: int, peer: int, deadline: Deadline) -> Link:
    """Return a connection of this ``rank`` to the listener of ``peer``.

    Raises:
        PeerLost: it cannot be reached in time, or does not have the key of ``address``.
    """
    is_path = isinstance(address.endpoint, str)
    connection = socket.socket(socket.AF_UNIX if is_path else socket.AF_INET, socket.SOCK_STREAM)
    link = Link(connection, peer)
    try:
        connection.settimeout(deadline.left(peer))
        connection.connect(address.endpoint)
        if not is_path:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        once, caller = secrets.token_bytes(_ONCE_BYTES), rank.to_bytes(_NUMBER_BYTES)
        bound = (_name(address), link.receive_exactly(_ONCE_BYTES, deadline)[0] + once, caller)
        connection.sendall(once + caller + proof(address.key, _PEER, *bound))
        code, _ = link.receive_exactly(_CODE_BYTES, deadline)
        if not hmac.compare_digest(code, proof(address.key, _LISTENER, *bound)):
            raise ConnectionAbortedError("what listens there does not have the key of the transfer")
    except PeerLost:
        link.close()
        raise
    except OSError as error:
        link.close()
        raise PeerLost(f"rank {peer} of the transfer: {error}", peer=peer, cause=str(error)) from error
    return link
