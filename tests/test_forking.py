"""Forked ranks: results by rank, the traceback of the first failure, and no processes left over."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from tests.forking import RankFailure, run_ranks

pytestmark = pytest.mark.processes


def test_the_first_failing_rank_is_reported_while_the_others_wait_for_it() -> None:
    def fails_on_rank_1() -> None:
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        dist.barrier()

    with pytest.raises(RankFailure) as caught:
        run_ranks(fails_on_rank_1, 3)
    assert caught.value.ranks == [1] and "in fails_on_rank_1" in caught.value.traceback
    assert caught.value.traceback.endswith("ValueError: the cause\n")


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
