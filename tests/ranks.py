"""``run_ranks``: a function on several ranks, simulated in this process, and forked where there is a GPU.

Tests of what ranks compute together import it from this module. Tests of real transports, of processes and of what a
process does outside of Python import ``run_ranks`` of ``tests.forking``, with the same arguments.

A test that uses it has the mark ``simulated``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from parallel_state import simulated

__all__ = ["run_ranks"]

T = TypeVar("T")

if torch.cuda.is_available():  # also on the fake CUDA device
    from tests.forking import run_ranks
else:

    def run_ranks(fn: Callable[..., T], world_size: int, *args: Any) -> list[T]:
        """Run ``fn(*args)`` on ``world_size`` simulated ranks, and return their results by rank.

        Raises:
            BaseException: what the first rank that failed raised, with the positions of the others in a note.
        """
        sys.audit("tests.ranks.run_ranks")  # for tests/process_guard.py
        return simulated.run_ranks(world_size, fn, *args)
