"""How well the speeds of generation and training fit."""

from __future__ import annotations

import math
import time

FITS = 0.05
"""The share of the time that a side may wait for the other before a change is proposed."""


class Balance:
    """The seconds in which the trainer waited for responses, and in which the rollout had nothing to generate.

    Generation is counted by steps. One that has ended counts until the controller sees it, at most the time between
    two stages.

    Attributes:
        waited: [s] of the trainer, in the whole run.
        idle: [s] of the rollout.
        elapsed: [s] from the first step.
    """

    def __init__(self) -> None:
        self.waited = self.idle = self.elapsed = 0.0
        self._step = time.perf_counter()
        self._free: float | None = None
        self._before = (0.0, 0.0)

    def sent(self) -> None:
        """Count a step of the engines that starts."""
        if self._free is not None:
            self.idle += time.perf_counter() - self._free
        self._free = None

    def ended(self) -> None:
        """Count a step that has ended."""
        self._free = time.perf_counter()

    def begin(self) -> None:
        """Forget the seconds before the first step."""
        self._step, self.waited, self.idle = time.perf_counter(), 0.0, 0.0

    def take_step(self) -> dict[str, float]:
        """Return the shares of the time since the last call in which each side waited for the other."""
        now = time.perf_counter()
        if self._free is not None:
            self.idle, self._free = self.idle + now - self._free, now
        seconds, self._step = max(now - self._step, 1e-9), now
        waited, idle = self.waited - self._before[0], self.idle - self._before[1]
        self.elapsed, self._before = self.elapsed + seconds, (self.waited, self.idle)
        return {"asynchronous/trainer_waited": waited / seconds, "asynchronous/rollout_waited": idle / seconds}

    def line(self, ranks: int) -> str:
        """Return the shares of the whole run, and how many ranks of the rollout would balance it.

        A rollout that is busy for the share ``r`` of the time, beside a trainer that is busy for ``t``, needs ``r / t``
        of its ``ranks`` to generate in the time of the training.

        Args:
            ranks: of the rollout.
        """
        if not self.elapsed:
            return ""
        waited, idle = min(self.waited / self.elapsed, 1.0), min(self.idle / self.elapsed, 1.0)
        text = f"the trainer waited {waited:.0%} of the time for responses, the rollout {idle:.0%} for the trainer"
        if max(waited, idle) < FITS:
            return f"{text}: balanced"
        wanted = max(1, math.ceil(ranks * (1.0 - idle) / max(1.0 - waited, 1e-3)))
        if wanted == ranks:
            return f"{text}: the pool of the rollout has the best size, {ranks}"
        speed = "slow" if wanted > ranks else "fast"
        return f"{text}: the pool of the rollout is too {speed}, {wanted} instead of {ranks} ranks would balance it"
