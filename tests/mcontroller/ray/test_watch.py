"""Processes that end while no call waits for them."""

from __future__ import annotations

import os
import signal
import time

import pytest

from mcontroller.errors import GroupBroken, WorkerDied
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.mcontroller.ray.roles import Plain

SECONDS = 10.0
"""That a busy machine may take for what takes less than 1 s on an idle one."""


def test_a_process_that_ends_between_calls_breaks_the_group_at_once(
    ray_cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    with RayResourcePool([2], use_gpu=False) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix="watched")
        pid = group.pid()[1]
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + SECONDS
        while group.broken is None and time.monotonic() < end:
            time.sleep(0.01)
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
