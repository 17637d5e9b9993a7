"""Windows of a profiler on chosen coordinates of a group, and the snapshot of an out-of-memory error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_state.simulated import run_ranks
from workers.profiling.profiler import Profiler


@pytest.mark.simulated
def test_the_ranks_with_the_coordinates_write_what_they_computed(tmp_path: Path) -> None:
    def compute() -> None:
        rank: Any = SimpleNamespace(tp_rank=torch.distributed.get_rank())
        profiler = Profiler(lambda: rank)
        profiler.start_profile(str(tmp_path), {"tp": 1})
        with profiler.during("update_actor"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.stop_profile()

    run_ranks(2, compute)
    [path] = tmp_path.iterdir()
    assert path.name == "rank-1.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names


def test_an_out_of_memory_error_writes_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory: Any = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(memory, "_record_memory_history", lambda max_entries: None)
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_text("allocations"))
    rank: Any = SimpleNamespace()
    profiler = Profiler(lambda: rank)
    assert profiler.save_memory_snapshot() is None
    profiler.record_memory(str(tmp_path))
    with pytest.raises(torch.OutOfMemoryError), profiler.during("update_actor"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert [path.name for path in tmp_path.iterdir()] == ["memory-out-of-memory-in-update_actor-rank-3.pickle"]
