"""The mark of the tests that start processes: found in their code, and enforced while a test runs."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys

import pytest

from tests.forking import run_ranks
from tests.ranks import run_ranks as run_simulated_ranks
from tests.tiers import ProcessGuard, is_starter, used_by, uses_simulated_ranks_alone


@functools.cache
def ranks() -> list[int]:
    return run_ranks(os.getpid, 2)


def simulated_ranks(count: int) -> list[int]:
    return run_simulated_ranks(os.getpid, count)


class Starter:
    def start(self) -> None:
        subprocess.run(["true"])


def test_code_that_starts_a_process_is_found_behind_caches_classes_and_inner_functions() -> None:
    def forks() -> None:
        (lambda: ranks())()

    def spawns() -> None:
        Starter()

    assert any(used is run_ranks for used in used_by(forks))
    assert any(used is subprocess for used in used_by(spawns))
    assert any(used is os.fork for used in used_by(lambda: os.fork()))
    assert not any(is_starter(used) for used in used_by(test_the_guard_rejects_a_process))


def test_tests_on_simulated_ranks_alone_have_their_mark(request: pytest.FixtureRequest) -> None:
    of_simulated_ranks, of_forked_ranks, of_both = (
        pytest.Function.from_parent(request.node.parent, name=function.__name__, callobj=function)
        for function in (lambda: simulated_ranks(2), lambda: ranks(), lambda: simulated_ranks(len(ranks())))
    )
    simulates = run_simulated_ranks is not run_ranks  # forked with a torch for CUDA
    assert uses_simulated_ranks_alone(of_simulated_ranks) == simulates
    assert not uses_simulated_ranks_alone(of_forked_ranks)
    assert not uses_simulated_ranks_alone(of_both)


def test_the_guard_rejects_a_process(request: pytest.FixtureRequest) -> None:
    guard = request.config.pluginmanager.get_plugin("process guard")
    assert isinstance(guard, ProcessGuard)
    with pytest.raises(
        RuntimeError, match=r"starts a process \(os.posix_spawn.*\): mark it with @pytest.mark.processes"
    ):
        os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    with contextlib.suppress(Exception):
        os.system("true")
    assert len(guard.started) == 2  # what the code under test catches is reported after the test
    guard.started.clear()


@pytest.mark.processes
def test_a_test_with_the_mark_may_start_a_process() -> None:
    assert os.waitpid(os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", ""]), 0)[1] == 0
