"""Checkpoints that another process writes while the worker goes on."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from parallel_state.releases import async_save_arguments

__all__ = ["BackgroundSaves"]


class BackgroundSaves:
    """At most one save in flight. Every method is a collective.

    A checkpoint contains the state at the time when ``begin`` returned. It is finished by ``finish``, which must be
    called before the next ``begin``, by ``finish_if_written``, or when the interpreter exits.
    """

    def __init__(self) -> None:
        self._calls: AsyncCallsQueue | None = None

    def begin(self, state: dict[str, Any], directory: str, then: Callable[[], None]) -> None:
        """Start to write ``state`` into ``directory``; ``then`` is called when every rank has written its part."""
        if self._calls is None:
            self._calls = AsyncCallsQueue()
            atexit.register(self.finish)
        request = dist_checkpointing.save(state, directory, async_sharded_save=True, **async_save_arguments())
        request.add_finalize_fn(then)
        self._calls.schedule_async_request(request)

    def finish_if_written(self) -> None:
        """Finish the save in flight, if there is one and every rank has written its part."""
        if self._calls is not None:
            self._calls.maybe_finalize_async_calls(blocking=False)

    def finish(self) -> None:
        """Wait for the save in flight, if there is one.

        Raises:
            CheckpointException: Megatron's, if a rank could not write its part; the directory does not appear.
        """
        if self._calls is not None:
            self._calls.maybe_finalize_async_calls(blocking=True)
