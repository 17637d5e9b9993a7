"""Connections between two ranks for the small messages around a bucket: it is ready, it was read.

A connection that ends reports a process that died at once; one that is silent until the deadline reports a hang.
"""

from __future__ import annotations

import hmac
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Collection
from typing import NamedTuple

from workers.weights.transfer.errors import PeerLost
from workers.weights.transfer.transport import Deadline

__all__ = ["Link", "Listener", "ListenerAddress", "connected"]

_TOKEN_BYTES, _NUMBER_BYTES = 32, 8


class ListenerAddress(NamedTuple):
    """The address of a listener.

    Attributes:
        endpoint: a path of a Unix socket, or a host and a port.
        token: proves to the listener that the one that connects was handed this address.
    """

    endpoint: str | tuple[str, int]
    token: bytes


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
            PeerLost: the connection has ended, or there was no message in time.
        """
        length, found = self._exactly(_NUMBER_BYTES, deadline, descriptors)
        message, _ = self._exactly(int.from_bytes(length), deadline)
        return message, found

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _exactly(self, count: int, deadline: Deadline, descriptors: int = 0) -> tuple[bytes, list[int]]:
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


class Listener:
    """Waits for connections of the peers.

    Args:
        host: the address of this node for other nodes; None for a Unix socket, in a directory that only this user
            can read.
    """

    def __init__(self, host: str | None = None) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._directory: str | None = None
        if host is None:
            self._directory = tempfile.mkdtemp(prefix="weights-")
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(os.path.join(self._directory, "socket"))
        else:
            self._socket = socket.create_server((host, 0))
        self._socket.listen(1024)
        endpoint = self._socket.getsockname()
        self.address = ListenerAddress(endpoint if host is None else (host, endpoint[1]), self._token)

    def accept(self, peers: Collection[int], deadline: Deadline) -> dict[int, Link]:
        """Return the connections of all ``peers``, and stop listening.

        Raises:
            PeerLost: a peer has not connected in time.
        """
        links: dict[int, Link] = {}
        try:
            while missing := sorted(set(peers) - links.keys()):
                self._socket.settimeout(deadline.left(missing[0]))
                try:
                    connection, _ = self._socket.accept()
                except TimeoutError:
                    continue  # the deadline raises
                link = Link(connection, missing[0])
                hello, _ = link.receive(deadline)
                token, rank = hello[:_TOKEN_BYTES], int.from_bytes(hello[_TOKEN_BYTES:])
                if not hmac.compare_digest(token, self._token) or rank not in missing:
                    connection.close()
                    continue
                link.peer = rank
                links[rank] = link
        finally:
            self.close()
        return links

    def close(self) -> None:
        """Stop listening, and remove the socket's file."""
        self._socket.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def connected(address: ListenerAddress, rank: int, peer: int, deadline: Deadline) -> Link:
    """Return a connection of this ``rank`` to the listener of ``peer``.

    Raises:
        PeerLost: it cannot be reached in time.
    """
    endpoint, token = address
    is_path = isinstance(endpoint, str)
    connection = socket.socket(socket.AF_UNIX if is_path else socket.AF_INET, socket.SOCK_STREAM)
    link = Link(connection, peer)
    connection.settimeout(deadline.left(peer))
    try:
        connection.connect(endpoint)
    except OSError as error:
        raise PeerLost(f"rank {peer} of the transfer: {error}", peer=peer, cause=str(error)) from error
    if not is_path:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.send(token + rank.to_bytes(_NUMBER_BYTES), deadline)
    return link
