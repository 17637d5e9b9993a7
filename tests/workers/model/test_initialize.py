"""Initial weights are drawn on several threads, and do not depend on their number."""

from __future__ import annotations

import pytest
import torch

from tests.forking import run_ranks
from tests.training import SMALL_GPT, new_context
from workers.config import ParallelConfig
from workers.model import initialize
from workers.model.build import build_model

pytestmark = pytest.mark.processes


def drawn_on(cpus: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Return the weights that are drawn on a machine with so many CPUs."""
    ranks_of_node = torch.cuda.device_count() if torch.cuda.is_available() else 1
    monkeypatch.setattr(initialize.os, "sched_getaffinity", lambda pid: range(cpus * ranks_of_node))
    parallel = ParallelConfig()
    [chunk] = build_model(SMALL_GPT, parallel, new_context(parallel))
    return dict(chunk.state_dict())


def test_threads_draw_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    [expected] = run_ranks(drawn_on, 1, 1, monkeypatch)
    [weights] = run_ranks(drawn_on, 1, 3, monkeypatch)
    tensors = {name: value for name, value in expected.items() if value is not None and value.numel()}
    assert all(torch.equal(weights[name], value) for name, value in tensors.items())
