"""What .ci/check-wheel runs in an environment without Ray: pytest's fixtures, errors for missing packages."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mcontroller
from mcontroller import Dispatch, MissingPackageError, Worker, register
from mcontroller.cli.main import main
from parallel_state import ParallelLayout

LAYOUT = ParallelLayout(4, tp=2)


class Summing(Worker):
    """Sums a number over all ranks."""

    @register(Dispatch.ONE_TO_ALL)
    def rank_of_worker(self) -> int:
        return dist.get_rank()

    @register(Dispatch.ONE_TO_ALL)
    def sum_with_rank(self, value: float) -> float:
        dist.init_process_group("gloo")
        total = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(total)
        return total.item()


def test_there_is_no_ray() -> None:
    assert [importlib.util.find_spec(name) for name in ("ray", "zmq", "omegaconf", "rich")] == [None] * 4


def test_mocked_and_simulated_groups_run(mock_group: Any, simulated_group: Any) -> None:
    assert mock_group(Summing, LAYOUT).rank_of_worker() == [0, 1, 2, 3]
    assert simulated_group(Summing, LAYOUT).sum_with_rank(1.0) == [10.0] * 4


def test_a_test_runs_as_one_rank_of_a_layout(mock_rank: Any) -> None:
    from megatron.core import parallel_state

    mock_rank(LAYOUT, 3)
    assert parallel_state.get_tensor_model_parallel_rank() == 1


def test_a_layout_is_verified(verify_layout: Any) -> None:
    assert verify_layout("verify/gpt.py:program", "tp=2,pp=2").equal


def test_what_needs_ray_names_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MissingPackageError) as caught:
        _ = mcontroller.RayWorkerGroup
    assert caught.value.extra == "ray"
    assert main(["train", "run.yaml"]) == 1
    assert "mcontroller[ray]" in capsys.readouterr().err
