"""Fail a test that starts a process, or runs on simulated ranks, without the mark that says so.

The marks are declared in the files of the tests: ``processes`` for a test that starts a process, ``simulated`` for one
on the ranks of ``tests.ranks``. A test that uses the cluster of the run has the mark ``processes`` by its fixture. What
has no mark is the fast tier, and this keeps it fast.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

MARKS = {
    "os.fork": "processes",
    "os.forkpty": "processes",
    "os.posix_spawn": "processes",
    "os.system": "processes",
    "subprocess.Popen": "processes",
    "tests.ranks.run_ranks": "simulated",
}
"""Events of Python's audit hooks -> the mark that allows them."""

STARTED_BY_IMPORTS = ("fc-list", "git")
"""Programs that imports run: matplotlib's first one on a machine, and megatron-core's since 0.19."""


class ProcessGuard:
    """Fail a test with neither mark if it starts a process or simulated ranks."""

    def __init__(self) -> None:
        self._guarded = False
        self.started: list[str] = []
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if self._guarded and event in MARKS and args[:1] not in {(program,) for program in STARTED_BY_IMPORTS}:
            message = f"the test starts a process ({event}{args[:2]}): mark it with @pytest.mark.{MARKS[event]}"
            self.started.append(message)
            raise RuntimeError(message)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Watch a test without a mark, and the fixtures that are set up for it."""
        self._guarded = all(item.get_closest_marker(mark) is None for mark in MARKS.values())
        try:
            return (yield)
        finally:
            self._guarded = False

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        """Fail if the code under test caught the exception that the guard raised."""
        started, self.started = self.started, []
        assert not started, started[0]
