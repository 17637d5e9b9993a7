"""Seconds by stage, of the current step and of the whole run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Stages"]


class Stages:
    """A stopwatch: ``with stages("generate"): ...`` adds the seconds of the block to that stage; stages do not nest.

    Attributes:
        totals: seconds by stage, of the whole run.
    """

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._step: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to the stage ``name``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.totals[name] = self.totals.get(name, 0.0) + seconds
            self._step[name] = self._step.get(name, 0.0) + seconds

    def take_step(self) -> dict[str, float]:
        """Return the seconds by stage since the last call of this method."""
        step, self._step = self._step, {}
        return step
