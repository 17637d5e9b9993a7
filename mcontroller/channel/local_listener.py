"""Opening of local connections: both sides prove that they have the key of the group, without sending it.

The endpoint sends a number that is used once. The controller answers with a number of its own, its name, and a code
(HMAC) of both numbers, its name and that of the endpoint's socket, which only who has the key can compute, and with the
descriptor of its shared memory. The endpoint checks the code and sends another, which the controller checks. A code is
of no use in another connection.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mcontroller.channel.local_connection import LocalConnection

__all__ = ["PROOF_SECONDS", "UNPROVEN", "LocalListener", "OpeningConnection", "proof"]

UNPROVEN = 64
"""Connections that have not proven yet that they have the key; a further one closes the oldest."""

ACCEPTED_AT_ONCE = 8
"""Connections that are accepted one after another: the thread also answers queries, and anyone may connect without end.
"""

PAUSE_SECONDS = 0.02
"""Seconds after so many connections, or without a free descriptor, until the next are accepted: strangers must not keep
the process busy."""

PROOF_SECONDS = 5.0
"""Seconds in which a new connection must prove that it has the key."""

_NUMBER_BYTES = _CODE_BYTES = 32
_NAME_BYTES = 256
_SERVER, _CLIENT = b"mcontroller endpoint", b"mcontroller controller"


def proof(key: bytes, side: bytes, name: str, numbers: bytes, caller: bytes) -> bytes:
    """Return the code that only who has the key can compute, of what a connection has of its own."""
    parts = (side, name.encode(), numbers, caller)
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


@dataclass(slots=True)
class _Unproven:
    connected: socket.socket
    number: bytes = field(default_factory=lambda: secrets.token_bytes(_NUMBER_BYTES))
    opened: float = field(default_factory=time.monotonic)


class LocalListener:
    """Accepts local connections, and checks that they have the key. Used by one thread; never waits.

    Args:
        key: the key.
        most: connections that may be open at once, proven ones included.
        accepted: called with the name of a controller and its connection.

    Attributes:
        name: the name of the socket, abstract, so that it is no file: anyone in the same network namespace can find it.

    Raises:
        OSError: the system has no such sockets.
    """

    def __init__(self, key: bytes, most: int, accepted: Callable[[bytes, LocalConnection], None]) -> None:
        self.name = f"mcontroller-{secrets.token_hex(16)}"
        self._key, self._most, self._accepted = key, most, accepted
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(socket.SOMAXCONN)
        self._poll = select.epoll()
        self._poll.register(self._socket.fileno(), select.EPOLLIN)
        self._paused_until: float | None = None
        self._unproven: dict[int, _Unproven] = {}
        self._proven: list[LocalConnection] = []

    def fileno(self) -> int:
        """Return the descriptor to poll before ``serve``."""
        return self._poll.fileno()

    @property
    def seconds(self) -> float | None:
        """Seconds after which ``serve`` should be called even so; None if there is no need to."""
        if self._paused_until is not None:
            return max(0.0, self._paused_until - time.monotonic())
        return PROOF_SECONDS / 5 if self._unproven else None

    def serve(self) -> None:
        """Accept connections, a few at once, check proofs, and close those that are late."""
        if self._paused_until is not None and time.monotonic() >= self._paused_until:
            self._paused_until = None
            self._poll.modify(self._socket.fileno(), select.EPOLLIN)
        for descriptor, _ in self._poll.poll(0):
            if descriptor == self._socket.fileno():
                self._accept()
            elif descriptor in self._unproven:
                self._check(self._unproven.pop(descriptor))
        for descriptor, each in tuple(self._unproven.items()):
            if time.monotonic() - each.opened > PROOF_SECONDS:
                self._drop(descriptor)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connected, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is free
                break
            self._proven = [each for each in self._proven if each.fileno() >= 0]
            if len(self._proven) >= self._most:
                connected.close()
                continue
            if len(self._unproven) >= UNPROVEN:
                self._drop(next(iter(self._unproven)))
            connected.setblocking(False)
            unproven = self._unproven[connected.fileno()] = _Unproven(connected)
            self._poll.register(connected.fileno(), select.EPOLLIN)
            with contextlib.suppress(OSError):
                connected.send(unproven.number)
        self._paused_until = time.monotonic() + PAUSE_SECONDS
        self._poll.modify(self._socket.fileno(), 0)

    def _check(self, unproven: _Unproven) -> None:
        connected = unproven.connected
        self._poll.unregister(connected.fileno())
        descriptors: list[int] = []
        try:
            received, descriptors, _, _ = socket.recv_fds(connected, _NUMBER_BYTES + _CODE_BYTES + _NAME_BYTES, 1)
            number, rest = received[:_NUMBER_BYTES], received[_NUMBER_BYTES:]
            code, caller = rest[:_CODE_BYTES], rest[_CODE_BYTES:]
            numbers = unproven.number + number
            if not hmac.compare_digest(code, proof(self._key, _CLIENT, self.name, numbers, caller)):
                raise ConnectionAbortedError("not the key of the group")
            connection = LocalConnection(connected, *descriptors)
            connected.send(proof(self._key, _SERVER, self.name, numbers, caller))
        except (OSError, ValueError):  # the latter from what is no memory
            connected.close()
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._proven.append(connection)
        self._accepted(caller, connection)

    def _drop(self, descriptor: int) -> None:
        unproven = self._unproven.pop(descriptor)
        self._poll.unregister(descriptor)
        unproven.connected.close()


class OpeningConnection:
    """A controller's connection to a ``LocalListener`` that is being opened. Its methods do not wait.

    Args:
        name: the name of the listener.
        key: the key.
        caller: the name of this controller.
        memory: the descriptor of its shared memory.

    Raises:
        OSError: nobody listens there, or too many try to connect.
    """

    def __init__(self, name: str, key: bytes, caller: bytes, memory: int) -> None:
        self._name, self._key, self._caller, self._memory = name, key, caller, memory
        self._expected: bytes | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self._socket.connect(f"\0{name}")
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor to poll for reading before ``advance``."""
        return self._socket.fileno()

    def advance(self) -> LocalConnection | None:
        """Take the next step; return the connection after the last one.

        Raises:
            OSError: the other side has closed the connection, or does not have the key.
        """
        try:
            received = self._socket.recv(max(_NUMBER_BYTES, _CODE_BYTES))
        except BlockingIOError:
            return None
        if not received:
            raise ConnectionResetError("the other side has closed the connection")
        if self._expected is None:
            number = secrets.token_bytes(_NUMBER_BYTES)
            numbers = received + number
            self._expected = proof(self._key, _SERVER, self._name, numbers, self._caller)
            code = proof(self._key, _CLIENT, self._name, numbers, self._caller)
            socket.send_fds(self._socket, [number + code + self._caller], [self._memory])
            return None
        if not hmac.compare_digest(received, self._expected):
            raise ConnectionAbortedError("the other side does not have the key of the group")
        return LocalConnection(self._socket)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
