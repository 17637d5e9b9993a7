"""Checkpoints that another process writes while the worker goes on."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from workers.checkpoint.writer import PlannedWrite

__all__ = ["BackgroundSaves"]


class BackgroundSaves:
    """At most one save in flight. Every method is a collective.

    A checkpoint contains the state at the time when ``begin`` returned. It is finished by ``finish``, which must be
    called before the next ``begin``, by ``finish_if_written``, or when the interpreter exits.
    """

    def __init__(self) -> None:
        self._write: PlannedWrite | None = None
        self._finishing: Callable[[], AbstractContextManager[None]] | None = None
        self._used = False

    def begin(self, write: PlannedWrite, finishing: Callable[[], AbstractContextManager[None]]) -> None:
        """Start the write of a checkpoint.

        Args:
            write: its finish makes the checkpoint visible.
            finishing: makes the context in which the write is finished.
        """
        if not self._used:
            self._used = True
            atexit.register(self.finish)
        write.start()
        self._write, self._finishing = write, finishing

    def finish_if_written(self) -> None:
        """Finish the save in flight, if there is one and every rank has written its part.

        Raises:
            DataError: on every rank, if one of them could not write its part; the directory does not appear.
        """
        if self._write is None:
            return
        writing = torch.tensor([not self._write.is_written()], dtype=torch.int32, device=torch.cuda.current_device())
        dist.all_reduce(writing)
        if not writing.item():
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight, if there is one.

        Raises:
            DataError: on every rank, if one of them could not write its part; the directory does not appear.
        """
        write, finishing = self._write, self._finishing
        self._write = self._finishing = None
        if write is not None and finishing is not None:
            with finishing():
                write.finish()
