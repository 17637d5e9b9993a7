"""Seconds and memory by stage, of the current step; seconds of the whole run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mcontroller.group import GroupMethod, WorkerGroup
from mcontroller.ppo.devices import SharedDevices

__all__ = ["Stages"]


class Stages:
    """The stages of a step: ``with stages("generate", actor.generate_sequences): ...``. They do not nest.

    A stage hands the memory of shared devices to the group that it calls, and adds the seconds of its block to its
    name; those of handing over are added to the stage ``offload``.

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
        self._called: dict[str, tuple[WorkerGroup[Any], dict[str, str]]] = {}

    @contextmanager
    def __call__(self, name: str, method: GroupMethod[..., Any, Any] | None = None) -> Iterator[None]:
        """Run the block as the stage ``name``.

        Args:
            name: of the stage.
            method: the method of a group that the block calls, if it calls one.
        """
        if method is not None:
            self._called.setdefault(method.group.name, (method.group, {}))[1][method.name] = name
            if self.devices.are_shared(method.group):
                with self._timed("offload"):
                    self.devices.make_room(method)
        with self._timed(name):
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a stage."""
        self.totals[name] = self.totals.get(name, 0.0) + seconds
        self._step[name] = self._step.get(name, 0.0) + seconds

    @property
    def step_seconds(self) -> float:
        """Seconds in stages since the last call of ``take_step``."""
        return sum(self._step.values())

    def take_step(self) -> dict[str, float]:
        """Return the seconds by stage since the last call of this method."""
        step, self._step = self._step, {}
        return step

    def take_memory(self) -> dict[str, float]:
        """Return the memory of every called group by stage since the last call: ``memory/<group>/<stage>/<value>``.

        The values are those that the worker class reports, the most over the ranks: see ``workers.memory.use``. Groups
        whose worker class has no registered method ``take_memory_use`` are left out.
        """
        called, self._called = self._called, {}
        reporting = {name: pair for name, pair in called.items() if "take_memory_use" in dir(pair[0])}
        reports = {name: group.take_memory_use.options(blocking=False)() for name, (group, _) in reporting.items()}
        metrics: dict[str, float] = {}
        for group, report in reports.items():
            stages = reporting[group][1]
            for of_rank in report.get():
                for method in of_rank.keys() & stages.keys():
                    for value, size in of_rank[method].items():
                        key = f"memory/{group}/{stages[method].replace(' ', '_')}/{value}"
                        metrics[key] = max(size, metrics.get(key, 0.0))
        return metrics
