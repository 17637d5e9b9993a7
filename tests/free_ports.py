"""Ranges of TCP ports that no process uses, and that the kernel assigns to none that asks for any free port."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

RAY_WORKERS_END = 20_000
"""Ray assigns ports below this one to its workers."""


def free_ports(count: int) -> tuple[int, int]:
    """Return the first and the last of ``count`` consecutive free ports."""
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = random.randrange(RAY_WORKERS_END, ephemeral - count)
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            return first, first + count - 1
