"""Time of a call while strangers connect to the rank without end, over that while they are as busy elsewhere.

    python benchmarks/connect_flood.py [--strangers 3]

Anyone can connect to the port of an endpoint. One process has the endpoint, one is the controller, and each stranger is
one more; a stranger whose connection is refused costs as much of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection

from mcontroller.channel.address import Address, ChannelKeys
from mcontroller.channel.controller import Hub, ask
from mcontroller.channel.wire import CallHeader, pack_call
from mcontroller.channel.worker import Endpoint

CALLS, LIMIT, SECONDS = 300, 5.0, 30.0


def serve(keys: ChannelKeys, report: Connection) -> None:
    folder = tempfile.mkdtemp(prefix="channel-")
    endpoint = Endpoint("127.0.0.1", keys, {"echo": lambda reply, value: reply(value)}, folder=folder)
    report.send(endpoint.address)
    while True:
        caller, header, _, _ = endpoint.receive()
        endpoint.answer(caller, header.number, b"")


def connect_without_end(port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            pass


class Controller:
    def __init__(self, address: Address) -> None:
        self.address, self.sent, self.answers = address, 0, 0
        self.hub = Hub(b"controller", self._count, lambda *change: None)
        self.hub.connect([address])

    def _count(self, rank: int, frames: object) -> None:
        self.answers += 1

    def call(self) -> float:
        began = time.perf_counter()
        self.hub.send([(0, [pack_call(CallHeader(self.sent, self.sent, None, None, "empty"), b"")])])
        self.sent += 1
        if not self.hub.wait(lambda: self.answers == self.sent, SECONDS):
            sys.exit(f"a call had no answer in {SECONDS:g} s")
        return time.perf_counter() - began

    def query(self) -> float:
        began = time.perf_counter()
        if ask([self.address], "echo", 1, timeout=SECONDS) != [(1, [])]:
            sys.exit(f"a query had no answer in {SECONDS:g} s")
        return time.perf_counter() - began

    def milliseconds(self) -> tuple[float, float]:
        """Mean time of a call, and of a query."""
        times = [(self.call(), self.query()) for _ in range(CALLS)]
        return tuple(1e3 * statistics.mean(column) for column in zip(*times, strict=True))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strangers", type=int, default=3)
    strangers = parser.parse_args().strangers
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    fork.Process(target=serve, args=(ChannelKeys.generate(), sender), daemon=True).start()
    controller = Controller(receiver.recv())
    print(f"alone: a call takes {controller.call() * 1e3:.2f} ms")
    means = []
    for port, what in ((1, "busy strangers"), (controller.address.call_port, "strangers who connect")):
        processes = [fork.Process(target=connect_without_end, args=(port,), daemon=True) for _ in range(strangers)]
        for process in processes:
            process.start()
        threading.Event().wait(0.5)
        means.append(controller.milliseconds())
        print(f"{strangers} {what}: a call takes {means[-1][0]:.2f} ms, a query {means[-1][1]:.2f} ms")
        for process in processes:
            process.kill()
    ratios = [flooded / busy for busy, flooded in zip(*means, strict=True)]
    print(f"ratio: {ratios[0]:.2f} for a call, {ratios[1]:.2f} for a query; the limit is {LIMIT:g}")
    sys.exit(ratios[0] > LIMIT)


if __name__ == "__main__":
    main()
