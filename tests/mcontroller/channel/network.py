"""A network between two processes of a test, which can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Network:
    """Passes bytes on to an address, until it is cut."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._losing, self._lost = threading.Event(), threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(self._target)
                self._connections += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def lose_while(self, send: Callable[[], T]) -> T:
        """Drop the bytes of a message, then close the connections; new ones are accepted."""
        self._lost.clear()
        self._losing.set()
        sent = send()
        assert self._lost.wait(60)
        self.cut()
        self._losing.clear()
        return sent

    def cut(self) -> None:
        """Close the connections; new ones are accepted."""
        while self._connections:
            with contextlib.suppress(OSError):
                self._connections.pop().shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Close the connections and accept no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                if self._losing.is_set():
                    self._lost.set()
                else:
                    target.sendall(content)
        for side in (source, target):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
