"""How many threads a process of a group computes with on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mcontroller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register
from mcontroller.errors import ResourceError
from mcontroller.ray.threads import DEFAULT_MARK, chosen_threads, threads_of_rank


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


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, "2"])
def test_a_number_of_threads_that_cannot_be_is_rejected(threads: Any) -> None:
    with pytest.raises(ResourceError, match=r"threads is .*; expected a positive integer"):
        RayResourcePool([1], use_gpu=False, threads=threads)


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
