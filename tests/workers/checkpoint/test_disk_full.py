"""A save that cannot write fails on every rank with the cause, leaves nothing, and the next save works.

A limit of the file size stands for a full disk: the kernel ends a write with an error in both cases.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcontroller.errors import DataError, is_before_changes
from tests.forking import run_ranks
from tests.workers.roles import MODEL, actor, critic

pytestmark = pytest.mark.processes

RANKS = 2
FULL_ON = {"shard of rank 0": (0, 50_000), "shard of rank 1": (1, 50_000), "common.pt": (0, 100)}


def fails_then_works(path: str, rank: int, limit: int, asynchronous: bool) -> tuple[DataError, list[str], list[str]]:
    worker = critic({"tp": RANKS})
    worker.save_checkpoint(path, global_step=1, max_to_keep=1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if worker.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
    with pytest.raises(DataError) as caught:
        worker.save_checkpoint(path, global_step=2, max_to_keep=1, asynchronous=asynchronous)
        worker.wait_for_checkpoint()
    left = names(path)
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    worker.save_checkpoint(path, global_step=3, max_to_keep=1, asynchronous=asynchronous)
    worker.wait_for_checkpoint()
    assert worker.load_checkpoint(path) == 3
    return caught.value, left, names(path)


def names(path: str) -> list[str]:
    """Return the names in a directory, without the files and links that name the newest checkpoint."""
    return sorted(entry.name for entry in Path(path).iterdir() if not entry.name.startswith(("iter_", "latest")))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("where", FULL_ON)
def test_full_disk(tmp_path: Path, where: str, asynchronous: bool) -> None:
    rank, limit = FULL_ON[where]
    results: list[Any] = run_ranks(fails_then_works, RANKS, str(tmp_path), rank, limit, asynchronous, timeout_s=60)
    for error, left, after in results:
        assert error.rank == rank and error.path == str(tmp_path / ".global_step_2.partial")
        assert error.errno == errno.EFBIG and error.nbytes > limit
        assert left == ["global_step_1"]
        assert after == ["global_step_3"]


LORA = {"rank": 4, "alpha": 8.0, "targets": ["all-linear"]}


def export_fails_then_works(path: str, rank: int, method: str) -> tuple[str, bool, list[str], list[str]]:
    worker = actor({"pp": RANKS}, "actor", model=MODEL | ({"lora": LORA} if method == "export_adapter" else {}))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if worker.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, unlimited[1]))
    with pytest.raises(DataError) as caught:
        getattr(worker, method)(path)
    dist.barrier()
    left = os.listdir(Path(path).parent)
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    getattr(worker, method)(path)
    return caught.value.path, is_before_changes(caught.value), left, names(path)


@pytest.mark.parametrize(
    ("rank", "method", "file", "written"),
    [
        (0, "export_hf", "rank-00000", {"model-00001-of-00002.safetensors", "config.json"}),
        (1, "export_hf", "rank-00001", {"model-00001-of-00002.safetensors", "config.json"}),
        (0, "export_adapter", "adapter_model", {"adapter_model.safetensors", "adapter_config.json"}),
    ],
)
def test_an_export_that_one_rank_cannot_write_leaves_nothing_and_the_group_goes_on(
    tmp_path: Path, rank: int, method: str, file: str, written: set[str]
) -> None:
    target = tmp_path / "model"
    results = run_ranks(export_fails_then_works, RANKS, str(target), rank, method, timeout_s=60)
    for path, is_rejected, left, after in results:
        assert path.startswith(str(tmp_path / ".model.partial" / file)) and is_rejected
        assert left == []
        assert written <= set(after)
