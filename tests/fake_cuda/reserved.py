"""Used bytes of each fake CUDA device, shared by all processes, and a limit that raises ``OutOfMemoryError``.

The processes share a file that the environment variable ``FAKE_CUDA_RESERVED`` names together with the limit. Without
the variable there is no limit, and nothing is shared.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

__all__ = ["limit_bytes", "limited", "reserve", "reserved_by_all"]

_VARIABLE = "FAKE_CUDA_RESERVED"
_PROCESSES, _GPUS = 64, 8


@contextlib.contextmanager
def limited(file: Path, limit: int) -> Iterator[None]:
    """Context manager in which this process and its children have GPUs of so many bytes.

    Args:
        file: a new file.
        limit: [bytes] of each GPU.
    """
    np.zeros((_PROCESSES, 1 + _GPUS), np.int64).tofile(file)
    os.environ[_VARIABLE] = f"{limit},{file}"
    try:
        yield
    finally:
        del os.environ[_VARIABLE]


def limit_bytes() -> int | None:
    """Return the bytes of a GPU; None without a limit."""
    value = os.environ.get(_VARIABLE)
    return None if value is None else int(value.partition(",")[0])


def reserve(gpu: int, size: int) -> None:
    """Set the bytes that this process has of a GPU: those that torch reserves, and others.

    Raises:
        OutOfMemoryError: all processes together would have more than the limit; nothing has changed.
    """
    limit = limit_bytes()
    if limit is None:
        return
    with _table() as (table, row):
        others = int(table[:, 1 + gpu].sum() - table[row, 1 + gpu])
        if others + size > limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to reserve {size} bytes on GPU {gpu}, which has {limit} bytes of which "
                f"other processes have reserved {others}"
            )
        table[row, 1 + gpu] = size


def reserved_by_all(gpu: int) -> int:
    """Return the bytes that all processes have of a GPU."""
    with _table() as (table, _):
        return int(table[:, 1 + gpu].sum())


@contextlib.contextmanager
def _table() -> Iterator[tuple[np.ndarray, int]]:
    """The bytes by process and GPU, after the id of the process, and the row of this one; ended processes have 0."""
    path = os.environ[_VARIABLE].partition(",")[2]
    with open(path, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            table = np.memmap(file, np.int64, "r+", shape=(_PROCESSES, 1 + _GPUS))
            for row, process in enumerate(table[:, 0]):
                if process and not Path(f"/proc/{process}").exists():
                    table[row] = 0
            own = np.flatnonzero(table[:, 0] == os.getpid())
            row = int(own[0] if len(own) else np.flatnonzero(table[:, 0] == 0)[0])
            table[row, 0] = os.getpid()
            yield table, row
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # the table has the file open as long as an error's traceback has it
