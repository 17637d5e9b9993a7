"""Which tests start Ray or a second process: they have the mark ``processes`` and are not in the fast tier.

A test gets the mark here if it uses the fixture ``ray_cluster``, or if its code, that of its fixtures, or that of the
functions and classes of the tests that they use names ``run_ranks``, ``os.fork`` or the module ``subprocess``. Tests on
simulated ranks of ``tests.ranks`` get it too: they fork on a GPU, and the fast tier has no time for them. Any other
test that starts a process needs ``@pytest.mark.processes``. A test that starts a process and has no mark fails in every
tier.

A test on simulated ranks of ``tests.ranks`` alone also gets the mark ``simulated``; see ``tests.in_two_processes``.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

from mcontroller.testing import simulated_worker_group
from parallel_state import simulated
from tests import forking, ranks

STARTERS = (forking, forking.run_ranks, ranks.run_ranks, os.fork, subprocess)
STARTS_A_PROCESS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})


def needs_ray(item: pytest.Item) -> bool:
    """Whether the test uses the Ray cluster of the run."""
    return "ray_cluster" in getattr(item, "fixturenames", ())


def starts_processes(item: pytest.Item) -> bool:
    """Whether the code of a test shows that it uses Ray or starts a process."""
    return needs_ray(item) or any(is_starter(used) for used in _code_of(item))


def uses_simulated_ranks_alone(item: pytest.Item) -> bool:
    """Whether the code of a test shows that it uses simulated ranks, and neither Ray nor a second process."""
    found = [used for used in _code_of(item) if is_starter(used)]
    explicit = item.get_closest_marker("processes") is not None
    return bool(found) and not explicit and all(used is ranks.run_ranks is not forking.run_ranks for used in found)


def simulates_in_this_process(item: pytest.Item) -> bool:
    """Whether the code of a test names the simulator itself."""
    simulators = (simulated, simulated.run_ranks, simulated.Simulation, simulated_worker_group)
    makes_groups = "simulated_group" in getattr(item, "fixturenames", ())
    return makes_groups or any(used is simulator for used in _code_of(item) for simulator in simulators)


def _code_of(item: pytest.Item) -> Iterator[Any]:
    if not isinstance(item, pytest.Function):
        return iter(())
    fixtures = [fixture.func for overridden in item._fixtureinfo.name2fixturedefs.values() for fixture in overridden]
    return used_by(item.function, *fixtures)


def is_starter(used: Any) -> bool:
    """Whether this function or module starts processes."""
    return any(used is starter for starter in STARTERS)


def used_by(*functions: Any) -> Iterator[Any]:
    """Functions, classes and modules that functions of the tests name, directly or through other code of the tests."""
    pending = list(functions)
    seen: set[int] = set()
    while pending:
        used = inspect.unwrap(pending.pop())  # cached functions
        if id(used) in seen:
            continue
        seen.add(id(used))
        yield used
        if not (getattr(used, "__module__", None) or "").startswith("tests."):
            continue
        if isinstance(used, type):
            pending += [value for value in vars(used).values() if isinstance(value, FunctionType)]
        elif isinstance(used, FunctionType):
            names = _names(used.__code__)
            pending += [used.__globals__[name] for name in names if name in used.__globals__]
            pending += [os.fork] * ({"os", "fork"} <= names)


def _names(code: CodeType) -> set[str]:
    """The global names and attributes that a function and the functions inside it use."""
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*nested)


LISTS_FONTS = "fc-list"
"""The program that matplotlib runs when it is imported for the first time on a machine."""


class ProcessGuard:
    """Make a test without the mark ``processes`` fail if it starts a process."""

    def __init__(self) -> None:
        self._guarded = False
        self.started: list[str] = []
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if self._guarded and event in STARTS_A_PROCESS and args[0] != LISTS_FONTS:
            message = f"the test starts a process ({event}{args[:2]}): mark it with @pytest.mark.processes"
            self.started.append(message)
            raise RuntimeError(message)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Watch a test without the mark, and the fixtures that are set up for it."""
        self._guarded = item.get_closest_marker("processes") is None
        try:
            return (yield)
        finally:
            self._guarded = False

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        """Fail if the code under test caught the exception that the guard raised."""
        started, self.started = self.started, []
        assert not started, started[0]
