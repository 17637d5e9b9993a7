"""Initial weights are drawn on several threads, and do not depend on their number."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.forking import run_ranks
from tests.training import SMALL_GPT, new_context
from workers.config import ParallelConfig
from workers.model import initialize
from workers.model.build import build_model

pytestmark = pytest.mark.processes


def drawn_on(cpus: int, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, torch.Tensor], int, int]:
    """The weights, the number of threads that drew them on so many CPUs, and the most tensors in memory at once."""
    ranks_of_node = torch.cuda.device_count() if torch.cuda.is_available() else 1
    monkeypatch.setattr(initialize.os, "sched_getaffinity", lambda pid: range(cpus * ranks_of_node))
    threads, drawing, most = set(), 0, 0
    lock, draw = threading.Lock(), initialize._initial_values
    together = threading.Barrier(min(cpus, 3))  # the first tensors are drawn at the same time

    def recorded(*args: Any) -> torch.Tensor:
        nonlocal drawing, most
        with lock:
            first = threading.get_ident() not in threads
            threads.add(threading.get_ident())
            drawing += 1
            most = max(most, drawing)
        if first:
            together.wait(timeout=60)
        values = draw(*args)
        with lock:
            drawing -= 1
        return values

    monkeypatch.setattr(initialize, "_initial_values", recorded)
    parallel = ParallelConfig()
    [chunk] = build_model(SMALL_GPT, parallel, new_context(parallel))
    return dict(chunk.state_dict()), len(threads), most


def test_threads_draw_several_tensors_at_once_and_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    [(expected, *one)] = run_ranks(drawn_on, 1, 1, monkeypatch)
    [(weights, *several)] = run_ranks(drawn_on, 1, 3, monkeypatch)
    assert one == [1, 1] and several == [3, 3]
    tensors = {name: value for name, value in expected.items() if value is not None and value.numel()}
    assert all(torch.equal(weights[name], value) for name, value in tensors.items())
