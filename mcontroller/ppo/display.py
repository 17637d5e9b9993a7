"""What a run tells whoever is watching it. The base class says nothing; ``progress`` shows it in a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from mcontroller.group import WorkerGroup

__all__ = ["Display"]


class Display:
    """Override what is to be seen; every method is called by the trainer, in its thread."""

    def starting(self, what: str) -> None:
        """Something that takes seconds begins."""

    def groups(self, groups: Mapping[str, WorkerGroup]) -> None:
        """All groups stand, by name."""

    def phase(self, name: str, steps: int, done: int = 0) -> None:
        """A phase of ``steps`` steps begins, ``done`` of which an earlier run has made."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """A step of the phase has ended."""

    def held_out(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out problems were decoded after so many steps of PPO."""

    def close(self) -> None:
        """The run has ended, in whatever way."""
