"""Forked ranks: results by rank, the traceback of the first failure, and no processes left over."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.forking import RankFailure, run_ranks

pytestmark = pytest.mark.processes


def test_results_come_back_by_rank() -> None:
    def sum_of_ranks(factor: int) -> tuple[int, torch.Tensor]:
        total = torch.tensor([dist.get_rank() * factor])
        dist.all_reduce(total)
        return dist.get_rank(), total

    results = run_ranks(sum_of_ranks, 3, 10)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(total, torch.tensor([30])) for _, total in results)


def test_a_large_result_does_not_block_the_pipe() -> None:
    sizes = run_ranks(lambda: torch.arange(1_000_000) + dist.get_rank(), 2)
    assert [int(tensor[-1]) for tensor in sizes] == [999_999, 1_000_000]


def test_the_first_failing_rank_is_reported_while_the_others_wait_for_it() -> None:
    def fails_on_rank_1() -> None:
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        dist.barrier()

    with pytest.raises(RankFailure) as caught:
        run_ranks(fails_on_rank_1, 3)
    assert caught.value.ranks == [1] and "in fails_on_rank_1" in caught.value.traceback
    assert caught.value.traceback.endswith("ValueError: the cause\n")


def test_a_rank_that_dies_is_reported() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(lambda: os._exit(3), 1)
    assert (caught.value.ranks, caught.value.traceback) == ([0], "")


def test_a_rank_that_hangs_is_killed_at_the_deadline() -> None:
    def hangs_on_rank_1() -> None:
        while dist.get_rank() == 1:
            time.sleep(1)

    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(hangs_on_rank_1, 2, timeout_s=1)
    assert caught.value.ranks == [1]
    assert time.monotonic() - started < 10


def test_no_process_is_left_over() -> None:
    reading, inherited = os.pipe()

    def starts_a_child() -> None:
        if os.fork() == 0:
            signal.pause()

    run_ranks(starts_a_child, 2)
    os.close(inherited)
    assert os.read(reading, 1) == b""  # the pipe is at its end only after all ranks and their children have exited
    os.close(reading)
