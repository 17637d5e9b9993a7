"""Processes that end or freeze while no call waits for them."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mcontroller.channel.options import ChannelOptions
from mcontroller.errors import ConnectionLost, GroupBroken, WorkerDied
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.mcontroller.ray.roles import Plain

SLOW = 10.0
"""[s] That a busy machine may take for what takes less than 1 s, or less than 5 s, on an idle one."""


@contextmanager
def watched(**options: float | None) -> Iterator[RayWorkerGroup]:
    channel = ChannelOptions(**options)
    with RayResourcePool([2], use_gpu=False, name_prefix="watched", channel=channel) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix="watched")
        yield group
        group.shutdown()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SLOW
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_that_ends_between_calls_breaks_the_group_at_once(
    ray_cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    with watched(watch_every=None) as group:
        pid = group.pid()[1]
        os.kill(pid, signal.SIGKILL)
        until(lambda: group.broken)
        with pytest.raises(WorkerDied) as first:
            group.pid()
        assert first.value is group.broken and (first.value.rank, first.value.pid) == (1, pid)
        assert first.value.exit_cause.startswith("killed by SIGKILL")
        with pytest.raises(GroupBroken) as later:
            group.pid()
        assert later.value.first_cause is first.value
    assert [record.message for record in caplog.records if record.name.startswith("mcontroller")] == [
        str(first.value).partition("\n")[0]
    ]


def test_a_stopped_process_is_logged_once_and_goes_on(ray_cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    with watched() as group:
        pid = group.pid()[1]
        os.kill(pid, signal.SIGSTOP)
        until(lambda: caplog.records)
        os.kill(pid, signal.SIGCONT)
        assert group.pid()[1] == pid
    [record] = caplog.records
    assert (
        record.levelno == logging.WARNING
        and f"watched rank 1 on {group.executor.nodes[1]}, pid {pid} has" in record.message
    )
    assert "in no call: the process is stopped: continue it with SIGCONT" in record.message


def test_a_process_frozen_in_native_code_ends_the_group_if_it_is_to(ray_cluster: None) -> None:
    with watched(frozen_after=0.5, report_after=1.5, end_frozen_after=2.0) as group:
        future = group.hold_the_interpreter_on.options(blocking=False, timeout=None)(1)
        until(lambda: group.broken)
        with pytest.raises(ConnectionLost) as caught:
            future.get()
        assert caught.value.rank == 1 and caught.value.method.startswith("hold_the")
