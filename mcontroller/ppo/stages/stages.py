"""Seconds and memory by stage, of the current step; seconds of the whole run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mcontroller.group import GroupMethod, WorkerGroup
from mcontroller.ppo.stages.devices import SharedDevices
from mcontroller.ppo.stages.overlap import OverlappingStages

__all__ = ["Stages"]

RESOLUTION_S = 1e-6
"""[s] Less than this is no overlap of stages, but rounding."""


class Stages:
    """The stages of a step: ``with stages("generate", actor.generate_sequences): ...``. They do not nest.

    A stage hands the memory of shared devices to the group that it calls, and adds the seconds of its block to its
    name; those of handing over are added to the stage ``offload``. Stages that do not depend on each other run at the
    same time in a block of ``overlapping``.

    Args:
        devices: the devices that groups share; by default none is shared.

    Attributes:
        totals: seconds by stage, of the whole run.
        devices: as passed.
    """

    def __init__(self, devices: SharedDevices | None = None) -> None:
        self.devices = devices or SharedDevices("never")
        self.totals: dict[str, float] = {}
        self._step: dict[str, float] = {}
        self._intervals: list[tuple[float, float]] = []
        self._called: dict[str, tuple[WorkerGroup[Any], dict[str, str]]] = {}

    @contextmanager
    def __call__(self, name: str, method: GroupMethod[..., Any, Any] | None = None) -> Iterator[None]:
        """Run the block as the stage ``name``.

        Args:
            name: of the stage.
            method: the method of a group that the block calls, if it calls one.
        """
        if method is not None:
            self.prepare(name, method)
        with self._timed(name):
            yield

    @contextmanager
    def overlapping(self) -> Iterator[OverlappingStages]:
        """Run the stages that the block starts at the same time, as far as their groups do not compete.

        The block ends when all of them have ended. If one fails, or the block raises, the others are cancelled: those
        that have not started never do, the results of the others are dropped, and the first error is raised.
        """
        stages = OverlappingStages(self)
        try:
            yield stages
            stages.finish()
        except BaseException:
            stages.cancel()
            raise

    def prepare(self, name: str, method: GroupMethod[..., Any, Any]) -> None:
        """Hand the memory of shared devices to the group of a method, which the stage ``name`` calls next."""
        group, _ = self._called.get(method.group.name, (None, {}))
        if group is not method.group:  # a group that was started again has the same name
            self._called[method.group.name] = (method.group, {})
        self._called[method.group.name][1][method.name] = name
        if self.devices.are_shared(method.group):
            with self._timed("offload"):
                self.devices.make_room(method)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.ran(name, started, time.perf_counter())

    def ran(self, name: str, started: float, ended: float) -> None:
        """Add the seconds of a stage that ran from ``started`` to ``ended``, by ``time.perf_counter``."""
        self._add(name, ended - started)
        self._intervals.append((started, ended))

    def _add(self, name: str, seconds: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + seconds
        self._step[name] = self._step.get(name, 0.0) + seconds

    def timing(self, started: float, tokens: int, samples: int) -> dict[str, float]:
        """Return the metrics of a step's time: the seconds of every stage (``take_step``) and of the whole, and rates.

        Args:
            started: when the step began, by ``time.perf_counter``.
            tokens: of the batch.
            samples: of the batch.
        """
        seconds = time.perf_counter() - started
        timing = {f"timing_s/{name.replace(' ', '_')}": spent for name, spent in self.take_step(seconds).items()}
        perf = {"perf/tokens_per_s": tokens / seconds, "perf/samples_per_s": samples / seconds}
        return timing | {"timing_s/step": seconds} | perf

    def take_step(self, seconds: float) -> dict[str, float]:
        """Return the seconds by stage since the last call of this method; all values together are ``seconds``.

        The seconds in which no stage ran are the stage ``controller``. Those that count in several stages, because
        these ran at the same time, are subtracted as ``overlapped``, which is negative.

        Args:
            seconds: since the last call.
        """
        covered = _covered(self._intervals)
        overlapped = covered - sum(self._step.values())
        self._add("controller", seconds - covered)
        if overlapped < -RESOLUTION_S:
            self._add("overlapped", overlapped)
        return self.drop_step()

    def drop_step(self) -> dict[str, float]:
        """Return the seconds by stage since the last call of ``take_step``, and start the next step."""
        step, self._step, self._intervals = self._step, {}, []
        return step

    def take_memory(self) -> dict[str, float]:
        """Return the memory of every called group by stage since the last call: ``memory/<group>/<stage>/<value>``.

        The values are those that the worker class reports, the most over the ranks: see ``MemoryUse``. Groups
        whose worker class has no registered method ``take_memory_use`` are left out.
        """
        return self.ask_memory(tuple(self._called))()

    def ask_memory(self, groups: Collection[str]) -> Callable[[], dict[str, float]]:
        """Ask groups for what ``take_memory`` returns, after the calls that they run now; return a function that waits.

        Args:
            groups: the names of groups; only those that were called since the last time are asked.
        """
        called = {name: self._called.pop(name) for name in groups if name in self._called}
        reporting = {name: pair for name, pair in called.items() if "take_memory_use" in dir(pair[0])}
        reports = {name: group.take_memory_use.options(blocking=False)() for name, (group, _) in reporting.items()}

        def metrics() -> dict[str, float]:
            found: dict[str, float] = {}
            for group, report in reports.items():
                stages = reporting[group][1]
                for of_rank in report.get():
                    for method in of_rank.keys() & stages.keys():
                        for value, size in of_rank[method].items():
                            key = f"memory/{group}/{stages[method].replace(' ', '_')}/{value}"
                            found[key] = max(size, found.get(key, 0.0))
            return found

        return metrics


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that are in at least one of the intervals."""
    covered, reached = 0.0, float("-inf")
    for started, ended in sorted(intervals):
        covered += max(0.0, ended - max(started, reached))
        reached = max(reached, ended)
    return covered
