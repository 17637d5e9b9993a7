"""Checkpoints that another process writes while the worker goes on."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import AbstractContextManager

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

__all__ = ["BackgroundSaves"]


class BackgroundSaves:
    """At most one save in flight. Every method is a collective.

    A checkpoint contains the state at the time when ``begin`` returned. It is finished by ``finish``, which must be
    called before the next ``begin``, by ``finish_if_written``, or when the interpreter exits.
    """

    def __init__(self) -> None:
        self._calls: AsyncCallsQueue | None = None
        self._finishing: Callable[[], AbstractContextManager[None]] | None = None

    def begin(self, request: AsyncRequest, finishing: Callable[[], AbstractContextManager[None]]) -> None:
        """Start to execute a request of ``prepare_write``.

        Args:
            request: its last finalization makes the checkpoint visible.
            finishing: makes the context in which the request is finalized.
        """
        if self._calls is None:
            self._calls = AsyncCallsQueue()
            atexit.register(self.finish)
        self._finishing = finishing
        self._calls.schedule_async_request(request)

    def finish_if_written(self) -> None:
        """Finish the save in flight, if there is one and every rank has written its part.

        Raises:
            DataError: on every rank, if one of them could not write its part; the directory does not appear.
        """
        self._finalize(blocking=False)

    def finish(self) -> None:
        """Wait for the save in flight, if there is one.

        Raises:
            DataError: on every rank, if one of them could not write its part; the directory does not appear.
        """
        self._finalize(blocking=True)

    def _finalize(self, *, blocking: bool) -> None:
        if self._calls is not None and self._finishing is not None:
            with self._finishing():
                finished = self._calls.maybe_finalize_async_calls(blocking=blocking)
            if finished:
                self._finishing = None
