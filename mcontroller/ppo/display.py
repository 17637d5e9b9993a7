"""Events of a run: a ``Display`` shows them to people, a ``Callback`` is code of a program that reacts to them.

The base classes do nothing; ``progress`` shows the events in a terminal. Pass callbacks to
``RayPPOTrainer(callbacks=...)``::

    class StopWhenSolved(Callback):
        def validated(self, trainer, metrics):
            if metrics.get("held_out/accuracy", 0.0) > 0.95:
                trainer.stop()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mcontroller.data.protocol import DataProto
from mcontroller.group import WorkerGroup

__all__ = ["Callback", "Display", "RunningTrainer"]


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


class RunningTrainer(Protocol):
    """The part of ``RayPPOTrainer`` that callbacks use most."""

    global_steps: int
    """Steps of PPO done."""

    def stop(self) -> None:
        """End training after the current step."""


class Callback:
    """Override the methods of the events to react to. They are called in the trainer's thread, in this order."""

    def started(self, trainer: RunningTrainer) -> None:
        """Run before the first step, after the warm-up or after a checkpoint was loaded."""

    def batch_ready(self, trainer: RunningTrainer, batch: DataProto) -> None:
        """Run before the updates of a step.

        Args:
            trainer: the trainer.
            batch: responses with ``token_level_scores``, ``advantages`` and ``returns``. Changes are trained on.
        """

    def step_ended(self, trainer: RunningTrainer, metrics: dict[str, float]) -> None:
        """Run after the updates of a step; additions to ``metrics`` are logged."""

    def validated(self, trainer: RunningTrainer, metrics: dict[str, float]) -> None:
        """Run after validation; additions to ``metrics`` are logged."""

    def saved(self, trainer: RunningTrainer, directory: str) -> None:
        """Run after a save under ``directory`` has started, which the groups may complete in the background."""

    def ended(self, trainer: RunningTrainer) -> None:
        """Run after the last step; not after an error."""
