"""Events of a run for people who watch it. The base class shows nothing; ``progress`` shows them in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcontroller.group import WorkerGroup

__all__ = ["Display"]


class Display:
    """Override the methods of the events to show; the trainer calls them in its own thread."""

    def starting(self, what: str) -> None:
        """Show the start of an operation that takes seconds, described by ``what``."""

    def groups(self, groups: Mapping[str, WorkerGroup]) -> None:
        """Show all groups, by name, after they have started."""

    def phase(self, name: str, steps: int, done: int = 0) -> None:
        """Show the start of a phase of ``steps`` steps, of which an earlier run has done ``done``."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step of the phase."""

    def samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Show samples of a finished step, each with its ``prompt``, ``response`` and ``score``."""

    def held_out(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of the held-out problems after ``step`` steps of PPO."""

    def close(self) -> None:
        """End the display; called once, also after an error."""
