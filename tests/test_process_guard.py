"""A test without a mark fails if it starts a process or ranks."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest

from tests.process_guard import ProcessGuard
from tests.ranks import run_ranks


def test_the_guard_rejects_a_process(request: pytest.FixtureRequest) -> None:
    guard = request.config.pluginmanager.get_plugin("process guard")
    assert isinstance(guard, ProcessGuard)
    with pytest.raises(RuntimeError) as caught:
        os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    assert "os.posix_spawn" in str(caught.value)
    with contextlib.suppress(Exception):
        os.system("true")
    assert len(guard.started) == 2  # what the code under test catches is reported after the test
    guard.started.clear()


def test_the_guard_rejects_ranks(request: pytest.FixtureRequest) -> None:
    with pytest.raises(RuntimeError):
        run_ranks(os.getpid, 2)
    request.config.pluginmanager.get_plugin("process guard").started.clear()


@pytest.mark.processes
def test_a_test_with_the_mark_may_start_a_process() -> None:
    assert os.waitpid(os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", ""]), 0)[1] == 0


@pytest.mark.simulated
def test_a_test_with_the_mark_may_run_on_ranks() -> None:
    assert len(run_ranks(os.getpid, 2)) == 2
