"""The connections of a process."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mcontroller.channel import controller
from mcontroller.channel.address import Address, ChannelKeys, KeyPair
from mcontroller.channel.controller import Links, ask
from tests.mcontroller.channel.endpoints import SECONDS, start_endpoint


def test_events_that_nobody_reads_do_not_stop_the_serving_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "RECONNECT_MS", 1)
    monkeypatch.setattr(controller, "RECONNECT_MAX_MS", 1)
    key = KeyPair.generate()
    lost = Links(b"name")
    for port in range(1, 41):  # closed ports
        lost.connect(b"link %d" % port, f"tcp://127.0.0.1:{port}", Address("127.0.0.1", port, port, key.public, key))
    end, count = time.monotonic() + 30.0, 0
    while count < 4000 and time.monotonic() < end:
        time.sleep(1.0)  # long enough to fill a queue of ZeroMQ's default limit
        count += sum(1 for _ in lost.events())
    time.sleep(1.0)
    assert count >= 4000
    lost.close()


def test_links_of_a_thread_that_has_ended_are_closed_in_order() -> None:
    """Else ZeroMQ's thread, which serves all connections, may wait for a reader of events that is closed."""
    sockets: list[Any] = []
    address = start_endpoint(ChannelKeys.generate())

    def ask_once() -> None:
        assert ask([address], "double", 3, timeout=SECONDS) == [(6, [])]
        sockets.append(controller._client()._links.socket)

    thread = threading.Thread(target=ask_once)
    thread.start()
    thread.join()
    assert sockets[0].closed
