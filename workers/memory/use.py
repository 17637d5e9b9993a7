"""Memory that a process uses during the calls of a role, measured."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

__all__ = ["MemoryUse"]

_GB = 2**30


class MemoryUse:
    """The most memory that this process used during the calls of each method."""

    def __init__(self) -> None:
        self._by_method: dict[str, dict[str, float]] = {}

    @contextlib.contextmanager
    def of(self, method: str) -> Iterator[None]:
        """Measure the block as a call of ``method``. It resets torch's peak of the allocated memory."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            past = self._by_method.setdefault(method, {})
            for name, value in _now().items():
                past[name] = max(value, past.get(name, 0.0))

    def take(self) -> dict[str, dict[str, float]]:
        """Return the measured values by method, and forget them.

        Returns:
            On a GPU ``allocated_gb`` and ``reserved_gb`` at the end of a call, and ``max_allocated_gb``, the peak
            during it; on a CPU ``resident_gb`` at the end of a call. The most over the calls of the method, in units of
            2**30 bytes. Roles that are fused in one process share its memory, so each reports that of all.
        """
        taken, self._by_method = self._by_method, {}
        return taken


def _now() -> dict[str, float]:
    if not torch.cuda.is_available():
        return {"resident_gb": _resident_bytes() / _GB}
    return {
        "allocated_gb": torch.cuda.memory_allocated() / _GB,
        "max_allocated_gb": torch.cuda.max_memory_allocated() / _GB,
        "reserved_gb": torch.cuda.memory_reserved() / _GB,
    }


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
