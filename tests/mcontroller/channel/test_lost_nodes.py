"""What happens when the other side is gone: a node that vanishes, and a controller that ends."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

import pytest

from mcontroller.channel import worker
from mcontroller.channel.address import ChannelKeys
from mcontroller.channel.wire import SILENT_SECONDS
from tests.mcontroller.channel.endpoints import SECONDS, Controller, elsewhere, start_endpoint


def test_the_kernel_ends_a_connection_without_answers() -> None:
    address = elsewhere(start_endpoint(ChannelKeys.generate()))
    controller = Controller([address])  # kept: the connection ends with it
    controller.call(0, b"x")
    sides = [
        connection
        for connection in _connections()
        if address.call_port in (connection.getsockname()[1], connection.getpeername()[1])
    ]
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


def test_the_answers_for_a_controller_that_has_ended_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MISSING_SECONDS", 0.2)
    forgotten: list[bytes] = []
    address = start_endpoint(ChannelKeys.generate(), forget=forgotten.append)
    ended, living = Controller([address], b"ended"), Controller([address], b"living")
    ended.call(0, b"x")
    living.call(0, b"x")
    ended.hub.close()
    end, later = time.monotonic() + SECONDS, 0
    while not forgotten and time.monotonic() < end:  # the endpoint looks for them when another controller calls
        Controller([address], b"later %d" % later).call(0, b"x")
        later += 1
        time.sleep(0.1)
    assert b"ended" in forgotten and b"living" not in forgotten
    living.answers.clear()
    living.send(0, b"ignored")  # the call has run: its answer is still there
    assert living.result(0) == {0: [b"x"]}


def _connections() -> list[socket.socket]:
    """Return duplicates of the connected TCP sockets of this process."""
    connections = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            duplicate = socket.socket(fileno=os.dup(int(descriptor)))
            if duplicate.family == socket.AF_INET and duplicate.getpeername():
                connections.append(duplicate)
    return connections
