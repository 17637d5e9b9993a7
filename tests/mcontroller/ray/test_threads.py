"""How a process of a group computes on the CPU: with how many threads, and in memory that it keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcontroller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register
from mcontroller.ray.threads import DEFAULT_MARK, chosen_threads, threads_of_rank

ROOT = Path(__file__).parents[3]


class Threads(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def threads(self) -> tuple[int, str]:
        import torch

        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_processes_of_a_node_share_its_cores() -> None:
    assert [threads_of_rank(None, None, 8, neighbors, on_gpu=False) for neighbors in (1, 3, 8, 20)] == [8, 2, 1, 1]


def test_a_choice_of_the_pool_comes_first_then_that_of_the_node() -> None:
    assert threads_of_rank(5, 3, 8, 2, on_gpu=False) == 5
    assert threads_of_rank(None, 3, 8, 2, on_gpu=False) == 3
    assert threads_of_rank(None, None, 8, 2, on_gpu=True) is None


def test_the_threads_that_ray_sets_by_default_are_nobodys_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert chosen_threads() == 4
    monkeypatch.setenv(DEFAULT_MARK, "1")
    assert chosen_threads() is None


def test_torch_computes_with_the_threads_of_the_pool(ray_cluster: None) -> None:
    pool = RayResourcePool([1], use_gpu=False, threads=3)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Threads), name_prefix="threads") as group:
        assert group.threads() == [(3, "3")]
        assert group.executor.threads == [3]
    pool.shutdown()
    pool = RayResourcePool([2], use_gpu=False)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Threads), name_prefix="threads") as group:
        [(threads, variable)] = set(group.threads())
        assert str(threads) == variable
        assert {threads} == set(group.executor.threads)
    pool.shutdown()


# Buffers of Python, in a process without torch: what torch allocates beside them moves them in the heap by chance.
FAULTS = """
import resource, sys
from mcontroller.ray.threads import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
size = 6 << 20
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffers = [b"1" * size for _ in range(4)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del buffers
print(faults / (4 * size / resource.getpagesize()))
"""


def faults_per_page(mode: str, **environment: str) -> float:
    command = [sys.executable, "-c", FAULTS, mode]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.processes
def test_freed_memory_is_used_again_without_page_faults_by_default() -> None:
    assert faults_per_page("keep") < 0.1
    assert faults_per_page("default") > 0.3
    assert faults_per_page("keep", MALLOC_TOP_PAD_="131072") > 0.3
