"""A node that vanishes without closing its connections is noticed on both sides."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from mcontroller.channel.address import ChannelKeys
from mcontroller.channel.links import SILENT_SECONDS
from tests.mcontroller.channel.endpoints import Controller, start_endpoint


def test_the_kernel_ends_a_connection_without_answers() -> None:
    address = start_endpoint(ChannelKeys.generate())
    Controller([address]).call(0, b"x")
    sides = [each for each in _connections() if address.call_port in (each.getsockname()[1], each.getpeername()[1])]
    assert len(sides) == 2
    for side in sides:
        idle, interval, probes, unacknowledged = (
            side.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        )
        assert side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + interval * probes <= SILENT_SECONDS
        assert unacknowledged == SILENT_SECONDS * 1000
        side.close()


def _connections() -> list[socket.socket]:
    """Return duplicates of the connected TCP sockets of this process."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            duplicate = socket.socket(fileno=os.dup(int(descriptor)))
            if duplicate.family == socket.AF_INET and duplicate.getpeername():
                found.append(duplicate)
    return found
