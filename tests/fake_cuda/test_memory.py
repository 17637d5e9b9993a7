"""Bytes of the fake CUDA devices: ``torch.cuda.memory_allocated`` and its relatives count live storages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from mcontroller.errors import WorkerError
from tests.fake_cuda.reserved import limited, reserved_by_all
from tests.fake_cuda.tags import CONTEXT_BYTES
from tests.forking import run_ranks
from tests.workers.roles import MODEL, actor, experience, own_shard
from tests.workers.test_colocated import trainer_of
from workers.memory.nccl import nccl_bytes

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def counted_from_here() -> Iterator[int]:
    """The bytes that other tests left on GPU 0."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield torch.cuda.memory_allocated()


KEPT: dict[str, tuple[Callable[[], object], int]] = {
    "a factory": (lambda: torch.ones(100, device="cuda"), 400),
    "a copy to the device": (lambda: torch.ones(100).cuda(), 400),
    "a view": (lambda: torch.ones(100, device="cuda")[:1], 400),
    "two views": (lambda: torch.ones(100, device="cuda").chunk(2), 400),
    "a cast": (lambda: torch.ones(100, device="cuda").bfloat16(), 200),
    "a deep copy": (lambda: copy.deepcopy(torch.ones(100, device="cuda")), 400),
    "a resized output": (lambda: torch.mul(torch.ones(100).cuda(), 2, out=torch.empty(0, device="cuda")), 400),
    "a module": (lambda: torch.nn.Linear(9, 11, device="cuda"), 440),
    "a module moved": (lambda: torch.nn.Linear(9, 11).cuda().bfloat16(), 220),
    "what backward saves": (lambda: torch.ones(100, device="cuda", requires_grad=True).exp().sum(), 804),
    "the host's": (lambda: torch.ones(100, device="cuda").cpu(), 0),
    "meta": (lambda: torch.ones(100, device="meta"), 0),
}


@pytest.mark.parametrize(("make", "size"), KEPT.values(), ids=KEPT)
def test_bytes_are_those_of_live_storages(make: Callable[[], object], size: int, counted_from_here: int) -> None:
    kept = make()
    assert torch.cuda.memory_allocated() - counted_from_here == size
    del kept
    assert torch.cuda.memory_allocated() == counted_from_here


def test_a_storage_that_is_emptied_frees_its_bytes(counted_from_here: int) -> None:
    tensor = torch.ones(100, device="cuda")
    tensor.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == counted_from_here
    tensor.untyped_storage().resize_(400)
    assert torch.cuda.memory_allocated() == counted_from_here + 400
    assert tensor.is_cuda


def test_the_peak_is_the_most_at_one_time(counted_from_here: int) -> None:
    tensor = torch.ones(100, device="cuda")
    tensor = tensor + 1
    assert torch.cuda.max_memory_allocated() == counted_from_here + 800
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == counted_from_here + 400


def test_freed_bytes_are_reserved_until_the_cache_is_emptied(counted_from_here: int) -> None:
    free, total = torch.cuda.mem_get_info()
    torch.ones(100, device="cuda")
    assert torch.cuda.memory_reserved() == counted_from_here + 400
    assert torch.cuda.mem_get_info() == (free - 400, total)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == torch.cuda.memory_allocated() == counted_from_here
    assert torch.cuda.mem_get_info() == (free, total)


def test_every_gpu_has_bytes_of_its_own(counted_from_here: int) -> None:
    before = torch.cuda.memory_allocated(1)
    with torch.cuda.device(1):
        kept = torch.ones(100, device="cuda")
    assert kept.device == torch.device("cuda", 1)
    assert torch.cuda.memory_allocated("cuda:1") - before == 400
    assert torch.cuda.memory_allocated() == counted_from_here


def fill_beside_another_process(limit: int) -> None:
    with torch.cuda.device(0):
        if dist.get_rank() == 1:
            kept = torch.ones(100, device="cuda")
        dist.barrier()
        if dist.get_rank() == 0:
            assert torch.cuda.mem_get_info() == (600, limit)
            kept = torch.ones(150, device="cuda")
            before = torch.cuda.memory_allocated()
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(1, device="cuda")
            assert torch.cuda.memory_allocated() == before
        dist.barrier()
        del kept


def test_processes_share_the_bytes_of_a_gpu_up_to_its_limit(counted_from_here: int, tmp_path: Path) -> None:
    limit = 2 * (CONTEXT_BYTES + counted_from_here) + 1000
    with limited(tmp_path / "reserved", limit):
        run_ranks(fill_beside_another_process, 2, limit)
        assert reserved_by_all(0) == 0


def used_around_a_mapping() -> list[int]:
    """Return the bytes of GPU 0 that all processes have, before and after rank 1, on GPU 1, maps memory of rank 0."""
    handles: list[Any] = [None]
    if dist.get_rank() == 0:
        kept = torch.zeros(8, dtype=torch.uint8, device="cuda")
        handles = [reductions.reduce_tensor(kept)]
    dist.broadcast_object_list(handles, 0)
    used = [reserved_by_all(0)]
    dist.barrier()
    if dist.get_rank() == 1:
        rebuild, arguments = handles[0]
        mapped = rebuild(*arguments)
        assert mapped.device == torch.device("cuda", 0)
    dist.barrier()
    return [*used, reserved_by_all(0)]


def test_a_process_that_maps_memory_of_another_gpu_has_a_context_there(tmp_path: Path) -> None:
    with limited(tmp_path / "reserved", 1 << 34):
        for before, after in run_ranks(used_around_a_mapping, 2):
            assert before > CONTEXT_BYTES
            assert after - before == CONTEXT_BYTES


WIDE = MODEL | {"dtype": "bfloat16", "hidden_size": 256}
SHARDED = {"distributed_optimizer": True}


def saved_and_updated(directory: str) -> list[str]:
    """Update, and save with 1.3 times the memory of that, in buckets and by weights; return which calls ran out."""
    worker = actor({}, "actor", model=WIDE, optim=SHARDED, ppo_epochs=1)
    batch, failed = own_shard(experience(8), worker), []
    worker.update_actor(batch)
    nccl = nccl_bytes(worker.context.layout, experts=False, sharded=True)
    limit = CONTEXT_BYTES + nccl + int(1.3 * torch.cuda.max_memory_allocated())
    with limited(Path(directory) / f"reserved of {torch.distributed.get_rank()}", limit):
        for reshardable in (False, True):
            torch.cuda.empty_cache()
            try:
                worker.save_checkpoint(directory, reshardable=reshardable)
            except torch.OutOfMemoryError:
                failed.append(f"reshardable={reshardable}")
        return failed


def test_a_periodic_save_fits_in_1_3_times_the_memory_of_an_update(tmp_path: Path) -> None:
    assert run_ranks(saved_and_updated, 2, str(tmp_path)) == [["reshardable=True"]] * 2


def steps_of_ppo(directory: str, limit: int, offload: str) -> list[str]:
    """Train with all roles on a GPU of so many bytes; return what was done before they ran out."""
    done: list[str] = []
    with limited(Path(directory) / offload, limit), trainer_of(offload, WIDE, SHARDED, {}) as trainer:
        try:
            trainer.init_workers()
            done.append("start")
            for step in range(2):
                trainer.train_step(trainer.train_batches[step])
                done.append(f"step {step}")
        except WorkerError as error:
            assert "OutOfMemoryError" in str(error)
            done.append("out of memory")
    return done


def test_colocated_roles_fit_in_1_3_times_the_memory_of_the_actors_update(tmp_path: Path) -> None:
    (counted,) = run_ranks(peak_of_update, 1)
    limit = CONTEXT_BYTES + int(1.3 * counted)
    assert run_ranks(steps_of_ppo, 1, str(tmp_path), limit, "auto") == [["start", "step 0", "step 1"]]
    assert run_ranks(steps_of_ppo, 1, str(tmp_path), limit, "never") == [["start", "out of memory"]]


def peak_of_update() -> int:
    """Return the bytes of an update of the actor, alone on its GPU."""
    before = torch.cuda.memory_allocated()
    worker = actor({}, "actor", model=WIDE, optim=SHARDED)
    worker.update_actor(own_shard(experience(8), worker))
    return torch.cuda.max_memory_allocated() - before
