"""Stopping a run early without losing its work: a signal, or a time limit that is near, ends it after a step.

The signals are those that schedulers send before they end a job (SIGTERM), that a keyboard sends (SIGINT), and that a
terminal sends when its connection is lost (SIGHUP). The run saves a checkpoint and ends with the exit code
``PREEMPTED``, so that a launcher can start it again with ``trainer.resume=true``.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

PREEMPTED = 75
"""Exit code of a run that was stopped early and can be resumed: EX_TEMPFAIL of sysexits.h."""

SAME_REQUEST_S = 1.0
"""[s] Signals that come so soon after the first one are the same request.

Ctrl-C reaches every process of a terminal, and a script that has started the run sends it a signal too; a lost terminal
sends SIGHUP, and so does its shell."""

_logger = logging.getLogger(__name__)


class Preempted(SystemExit):
    """Ends the program with the exit code ``PREEMPTED``; it is no error, so ``except Exception`` does not catch it.

    Attributes:
        reason: the signal or the limit.
        global_steps: steps of the checkpoint; None if none was saved.
    """

    def __init__(self, reason: str, global_steps: int | None) -> None:
        super().__init__(PREEMPTED)
        self.reason = reason
        self.global_steps = global_steps


class Preemption:
    """Whether a run is to stop after its step.

    Args:
        max_seconds: seconds from now in which the run must have ended, its last save included; 0 for no limit.
    """

    def __init__(self, max_seconds: float) -> None:
        self.max_seconds = max_seconds
        self._started = time.monotonic()
        self._signaled = 0.0
        self._longest = 0.0
        self._signal: signal.Signals | None = None

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time a step with its validation and its save: the next one is expected to take as long as the longest."""
        started = time.monotonic()
        yield
        self._longest = max(self._longest, time.monotonic() - started)

    def reason(self, *, saving: float = 0.0) -> str | None:
        """Return why the run is to stop now; None if it is to go on.

        Args:
            saving: seconds that a save is expected to take.
        """
        if self._signal is not None:
            return self._signal.name
        if self.max_seconds and time.monotonic() - self._started + self._longest + saving > self.max_seconds:
            return f"trainer.max_seconds={self.max_seconds:g}"
        return None

    def record(self, number: int, _: FrameType | None) -> None:
        """Record a signal instead of ending the program; a later one ends it at once."""
        if self._signal is not None:
            if time.monotonic() - self._signaled < SAME_REQUEST_S:
                return
            raise KeyboardInterrupt
        self._signal, self._signaled = signal.Signals(number), time.monotonic()
        _logger.warning("%s: the run stops after this step; send it again to stop at once", self._signal.name)


@contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Handle SIGTERM, SIGINT and SIGHUP so in the block, in the main thread: Python allows no handlers in others.

    SIGHUP stays ignored under ``nohup``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
