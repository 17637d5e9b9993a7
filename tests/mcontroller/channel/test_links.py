"""The connections of a process."""

from __future__ import annotations

import time

import pytest

from mcontroller.channel import links
from mcontroller.channel.address import Address, KeyPair
from mcontroller.channel.links import Links


def test_events_that_nobody_reads_do_not_stop_the_serving_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "RECONNECT_MS", 1)
    monkeypatch.setattr(links, "RECONNECT_MAX_MS", 1)
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
