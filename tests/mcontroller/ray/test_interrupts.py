"""Ctrl-C at any moment of a call leaves a group that works, or one that has ended: no later call waits for ever.

The ranks are threads of this process, so that a call takes less than a millisecond. The environment variable
``MCONTROLLER_TEST_INTERRUPTS`` is the number of interrupts.
"""

from __future__ import annotations

import gc
import itertools
import linecache
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mcontroller
from mcontroller.channel.address import Address, ChannelKeys
from mcontroller.channel.controller import ask
from mcontroller.channel.options import ChannelOptions
from mcontroller.errors import GroupBroken
from mcontroller.ray import process_handles
from mcontroller.ray.calls.executor import RayExecutor
from mcontroller.ray.calls.supervision import GroupCall, GroupProcesses
from mcontroller.ray.node_processes import NodeProcess
from mcontroller.ray.process import ProcessInfo
from mcontroller.ray.process_handles import ProcessHandles
from mcontroller.ray.values.wire import decode, encode
from mcontroller.transport import Arguments
from tests.mcontroller.channel.endpoints import start_endpoint

INTERRUPTS = int(os.environ.get("MCONTROLLER_TEST_INTERRUPTS", "300"))
RANKS = 3
SECONDS = 20.0
SESSION = ("node", "job")
OF_CALLS = tuple(str(Path(mcontroller.__file__).parent / folder) for folder in ("channel", "ray"))


def answer(frames: list[bytes]) -> list[bytes]:
    [arguments] = decode([(frames[0], frames[1:])])
    encoded = encode(arguments.args[0], 1 << 20)
    return [encoded.data, *encoded.frames]


def group_at(addresses: list[Address]) -> RayExecutor:
    process = NodeProcess.this()
    infos = [ProcessInfo("node", "id", os.getpid(), (), address, 0, process) for address in addresses]
    handles = ProcessHandles(lambda: None, ChannelOptions(), infos=infos, _session=SESSION)
    return RayExecutor(GroupProcesses("group", handles), "role")


def send(group: RayExecutor, value: Any) -> GroupCall:
    return group.submit("echo", {rank: Arguments((value,)) for rank in range(RANKS)}, range(RANKS), timeout=SECONDS)


@contextmanager
def interrupted_in(seconds: float) -> Iterator[None]:
    """Interrupt what is done within, in this many seconds."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Collect no garbage of earlier tests during the test: an interrupt in one of its finalizers is lost."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Address]]:
    monkeypatch.setattr(process_handles, "session", lambda: SESSION)
    monkeypatch.setattr(ProcessHandles, "_kill", lambda handles: [])
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    keys = ChannelKeys.generate()
    yield [start_endpoint(keys, answer) for _ in range(RANKS)]
    signal.signal(signal.SIGALRM, before)


@pytest.mark.timeout(300, method="thread")  # the other method needs the timer
@pytest.mark.parametrize("seed", [0])
def test_an_interrupt_at_any_moment_leaves_no_call_waiting(addresses: list[Address], seed: int) -> None:
    chosen = random.Random(seed)
    group = group_at(addresses)
    usual = statistics.median([_seconds(group) for _ in range(100)])
    interrupts = ended = 0
    while interrupts < INTERRUPTS:
        value, pause = chosen.choice(("small", b"x" * 40_000)), chosen.choice((0.0, 0.0, 0.001))
        sent: list[GroupCall] = []
        try:
            with interrupted_in(chosen.uniform(1e-6, 2 * usual + pause)):
                sent.append(send(group, value))
                time.sleep(pause)
                sent[0].result()
                ask(addresses, "double", 3, timeout=SECONDS)
        except KeyboardInterrupt:
            interrupts += 1
        try:
            assert send(group, interrupts).result() == [interrupts] * RANKS
            assert [call.result() for call in sent] == [[value] * RANKS for _ in sent]
        except GroupBroken as broken:
            assert "KeyboardInterrupt while role.echo was being sent" in str(broken)
            ended += 1
            group = group_at(addresses)
        assert ask(addresses, "double", interrupts, timeout=SECONDS) == [(2 * interrupts, [])] * RANKS
    assert 0 < ended < INTERRUPTS


@pytest.mark.timeout(300, method="thread")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of objects that were not made whole
@pytest.mark.usefixtures("no_garbage")
def test_an_interrupt_at_any_line_of_a_call_leaves_no_call_waiting(addresses: list[Address]) -> None:
    group = group_at(addresses)
    interrupted, ended = -1, 0
    for line in itertools.count():
        try:
            with raising_at(line):
                send(group, "small").result()
                ask(addresses, "double", 3, timeout=SECONDS)
            break
        except KeyboardInterrupt:
            interrupted = line
        try:
            assert send(group, line).result() == [line] * RANKS
        except GroupBroken:
            ended += 1
            group = group_at(addresses)
        assert ask(addresses, "double", line, timeout=SECONDS) == [(2 * line, [])] * RANKS
    assert interrupted > 50 and 0 < ended < interrupted


@contextmanager
def raising_at(line: int) -> Iterator[None]:
    """Raise KeyboardInterrupt at the line with this index, of those that the calls and their channel run within.

    But not at ``with``: its line comes again before the lock is released, and an interrupt does not come there.
    """
    lines = itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OF_CALLS):
            return None
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not source.lstrip().startswith("with ") and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def _seconds(group: RayExecutor) -> float:
    began = time.perf_counter()
    send(group, "small").result()
    return time.perf_counter() - began
