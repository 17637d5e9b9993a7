"""What a process answers while one of its calls is running: a thread of its own, at a port of its own.

Calls run on the main thread, as the same code would under torchrun, and Ray hands a process nothing else meanwhile.
So questions come here, one a connection: a line of JSON each way, behind the secret that the process told its
controller through Ray.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

__all__ = ["Desk", "ask", "open_desk", "tell"]

CONNECTIONS = 64
"""How many processes are asked at once."""

VISIT_SECONDS = 5.0
QUESTION_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Desk:
    """Where a process is asked, and the secret that it answers to."""

    host: str
    port: int
    secret: str = field(repr=False)


def open_desk(host: str, answers: Mapping[str, Callable[..., Any]]) -> Desk:
    """Answers questions at ``host``, this machine's address, until the process ends.

    ``answers`` has a function by question; what it takes and gives is JSON. It runs on a thread of the desk's.
    """
    server = _Server(host, answers)
    threading.Thread(target=server.serve_forever, args=(None,), name="desk", daemon=True).start()
    return Desk(host, server.server_address[1], server.secret)


def ask(desks: Sequence[Desk | None], question: str, *arguments: Any, timeout: float) -> list[Any]:
    """What each desk answers; None for one that is not known, or gives no answer within ``timeout`` seconds."""
    return _visit_all(desks, [question, *arguments], timeout, json.loads)


def tell(desks: Sequence[Desk | None], question: str, *arguments: Any, timeout: float) -> None:
    """Leaves word at each desk without waiting for an answer, for at most ``timeout`` seconds."""
    _visit_all(desks, [question, *arguments], timeout, None)


def _visit_all(
    desks: Sequence[Desk | None], question: list[Any], timeout: float, read: Callable[[bytes], Any] | None
) -> list[Any]:
    deadline = time.monotonic() + timeout

    def visit(desk: Desk | None) -> Any:
        left = deadline - time.monotonic()
        if desk is None or left <= 0:
            return None
        try:
            with socket.create_connection((desk.host, desk.port), left) as connection:
                connection.sendall(json.dumps([desk.secret, *question]).encode() + b"\n")
                if read is None:
                    return None
                with connection.makefile("rb") as answer:
                    return read(answer.readline())
        except (OSError, ValueError):  # nobody there, too late, or gone in the middle of its answer
            return None

    with ThreadPoolExecutor(min(len(desks), CONNECTIONS) or 1) as threads:
        return list(threads.map(visit, desks))


class _Server(ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, answers: Mapping[str, Callable[..., Any]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.answers = answers
        self.secret = secrets.token_hex(32)
        try:
            super().__init__((host, 0), _Visit)
        except OSError:  # an address by which others reach this machine, and which it does not know itself
            super().__init__(("", 0), _Visit)


class _Visit(StreamRequestHandler):
    server: _Server
    timeout = VISIT_SECONDS

    def handle(self) -> None:
        try:
            secret, question, *arguments = json.loads(self.rfile.readline(QUESTION_BYTES))
        except (OSError, ValueError, TypeError, RecursionError):  # whoever connects without knowing what to say
            return
        if hmac.compare_digest(str(secret).encode(errors="replace"), self.server.secret.encode()):
            answer = json.dumps(self.server.answers[question](*arguments)).encode() + b"\n"
            self.connection.sendall(answer)

    def finish(self) -> None:
        """Nobody need be left to hear the answer."""
