"""How many threads a process of a group computes with on the CPU."""

from __future__ import annotations

import os
import sys

__all__ = ["DEFAULT_MARK", "chosen_threads", "set_threads", "threads_of_rank", "usable_cores"]

DEFAULT_MARK = "MCONTROLLER_DEFAULT_THREADS"
"""Variable of a process whose OMP_NUM_THREADS is neither the node's nor the caller's choice."""


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
        neighbors: number of ranks of its group on its node.
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
