"""How a process of a group computes on the CPU: with how many threads, and in memory that it keeps."""

from __future__ import annotations

import ctypes
import os
import sys

DEFAULT_MARK = "MCONTROLLER_DEFAULT_THREADS"
"""Variable of a process whose OMP_NUM_THREADS is neither the node's nor the caller's choice."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of ``mallopt`` in glibc's malloc.h."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = 256 << 20, 32 << 20


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chosen_threads() -> int | None:
    """Return OMP_NUM_THREADS of this process, if the node or the caller has chosen it as a number; None otherwise."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(first) if first.isdigit() and DEFAULT_MARK not in os.environ else None


def threads_of_rank(of_pool: int | None, chosen: int | None, cores: int, neighbors: int, on_gpu: bool) -> int | None:
    """Return the threads of a rank; None to leave what Ray has set.

    Args:
        of_pool: the threads that the pool asks for; None for the default.
        chosen: ``chosen_threads`` of its process.
        cores: ``usable_cores`` of its process.
        neighbors: number of ranks on its node, of its group and of a group of each pool beside it.
        on_gpu: whether the rank has a GPU.
    """
    if of_pool is not None:
        return of_pool
    return chosen if on_gpu or chosen is not None else max(1, cores // neighbors)


def set_threads(threads: int) -> None:
    """Compute with this number of threads from now on, in this process and those that it starts."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:  # otherwise torch reads the variable when it is imported
        import torch

        torch.set_num_threads(threads)


def keep_freed_memory() -> None:
    """Let this process keep up to 256 MiB that it frees, for its next tensors.

    By default glibc gives more than a few MiB back to the system at once: in training on a CPU most tensors then begin
    with a page fault for each 4 KiB. Larger tensors than 32 MiB are given back as before. Nothing changes under another
    C library, or if the environment sets one of glibc's own variables, ``MALLOC_TRIM_THRESHOLD_`` for example.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
