"""Ranks in processes: a rank that fails ends its case, and those after it run."""

from __future__ import annotations

import os
import time
from contextlib import closing

import pytest
import torch.distributed as dist

from workers.gpucheck.ranks import Ranks
from workers.parity.cases import Case

pytestmark = pytest.mark.processes


def ranks_that_answer(case: Case) -> list[int]:
    answers = [-1] * case.ranks
    dist.all_gather_object(answers, dist.get_rank())
    return answers


def fail_on_rank_one(case: Case) -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such layout")
    dist.barrier()


def process_of(case: Case) -> int:
    return os.getpid()


def die_on_rank_zero(case: Case) -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


def sleep_on_rank_zero(case: Case) -> None:
    if dist.get_rank() == 0:
        time.sleep(1e6)
    dist.barrier()


def test_cases_after_one_that_fails_run_on_ranks_of_their_number() -> None:
    with closing(Ranks()) as ranks, closing(Ranks(gpus=False)) as others:
        process = others.run(process_of, Case(1))
        with pytest.raises(RuntimeError, match="rank 1: ValueError"):
            ranks.run(fail_on_rank_one, Case(2))
        assert others.run(process_of, Case(1)) == process
        assert ranks.run(ranks_that_answer, Case(1)) == [[0]]
        with pytest.raises(RuntimeError, match="rank"):
            ranks.run(die_on_rank_zero, Case(2))
        assert ranks.run(ranks_that_answer, Case(2)) == [[0, 1], [0, 1]]


def test_a_rank_that_hangs_outside_of_collectives_ends_and_its_line_is_written(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with closing(Ranks(limit_s=5.0)) as ranks, pytest.raises(RuntimeError, match="rank"):
        ranks.run(sleep_on_rank_zero, Case(2))
    assert "in sleep_on_rank_zero" in capfd.readouterr().err
