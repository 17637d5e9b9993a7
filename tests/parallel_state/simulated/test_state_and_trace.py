"""What each simulated rank has to itself, and the trace of what ranks communicate."""

from __future__ import annotations

import importlib
import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel_state.layout import ParallelLayout
from parallel_state.simulated import CommunicationTrace, Simulation, SimulationError, run_ranks
from parallel_state.simulated.scheduler import Scheduler

LAYOUT = ParallelLayout(8, tp=2, pp=2)


def mpu() -> Any:
    from megatron.core import parallel_state

    return parallel_state


def test_random_states_variables_device_and_directory_are_each_ranks_own(tmp_path: Any) -> None:
    def compute() -> tuple[Any, ...]:
        rank = dist.get_rank()
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(rank)
        os.environ["OWN"] = str(rank)
        os.chdir(tmp_path) if rank else None
        torch.set_default_dtype(torch.float64 if rank else torch.float32)
        if rank:
            torch.set_default_device("meta")
        dist.barrier()
        numbers = random.random(), float(np.random.rand()), float(torch.rand((), device="cpu", dtype=torch.float32))
        variables = os.environ["OWN"], os.environ["RANK"], os.getcwd() == str(tmp_path)
        return numbers, variables, torch.get_default_dtype(), torch.empty(1).device.type

    results = run_ranks(2, compute)
    for rank, (numbers, variables, dtype, device) in enumerate(results):
        random.seed(rank)
        expected = random.random(), float(np.random.RandomState(rank).rand())
        assert numbers == (*expected, float(torch.rand((), generator=torch.Generator().manual_seed(rank))))
        assert variables == (str(rank), str(rank), rank == 1)
        assert (dtype, device) == ((torch.float32, "cpu"), (torch.float64, "meta"))[rank]
    assert "OWN" not in os.environ
    assert torch.get_default_dtype() == torch.float32


def test_megatron_has_the_groups_of_the_layout_on_every_rank() -> None:
    def coordinates() -> tuple[int, int, int]:
        return (
            mpu().get_tensor_model_parallel_rank(),
            mpu().get_data_parallel_rank(),
            mpu().get_pipeline_model_parallel_rank(),
        )

    actual = run_ranks(LAYOUT, coordinates)
    assert actual == [(tp, dp, pp) for pp in range(2) for dp in range(2) for tp in range(2)]


def test_what_a_class_of_megatron_keeps_is_each_ranks_own() -> None:
    def tracked() -> dict[str, int]:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        MTPLossLoggingHelper.tracker["rank"] = dist.get_rank()
        dist.barrier()
        return dict(MTPLossLoggingHelper.tracker)

    assert run_ranks(2, tracked) == [{"rank": 0}, {"rank": 1}]


def test_ranks_keep_their_state_between_runs() -> None:
    simulation = Simulation(2)

    def initialize(rank: int) -> None:
        dist.init_process_group("gloo")
        os.environ["OWN"] = str(rank)

    def total() -> tuple[str, float]:
        dist.all_reduce(value := torch.ones(()))
        return os.environ["OWN"], float(value)

    simulation.run({0: lambda: initialize(0), 1: lambda: initialize(1)})
    assert simulation.run({0: total, 1: total}) == {0: ("0", 2.0), 1: ("1", 2.0)}
    simulation.close()


def test_a_trace_has_every_transfer_by_axis_operation_bytes_and_line() -> None:
    def layer() -> None:
        dist.all_reduce(torch.zeros(4), group=mpu().get_tensor_model_parallel_group())
        dist.all_reduce(torch.zeros(3, dtype=torch.bfloat16), group=mpu().get_data_parallel_group())
        dist.all_reduce(torch.zeros(2), group=mpu().get_model_parallel_group())

    trace = CommunicationTrace()
    run_ranks(LAYOUT, layer, trace=trace)
    assert len(trace) == 24
    (one,) = trace.select(operation="all_reduce", axis="tp", rank=5)
    assert (one.nbytes, one.members, one.group) == (16, (4, 5), "TENSOR_MODEL_PARALLEL_GROUP")
    assert one.line.startswith("tests/parallel_state/simulated/test_state_and_trace.py:")
    assert one.line.endswith(" in layer")
    assert trace.select(axis="dp").nbytes == 8 * 6
    assert len(trace.select(axis="tp-pp")) == 8
    assert "tp          all_reduce                     8           128" in trace.table()


def test_a_module_imported_by_a_rank_starts_with_its_values_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late.py").write_text(
        "count, counts = 0, []\ndef add():\n    global count, counts\n    count += 1\n    counts = [*counts, count]\n"
        "    return count\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def compute(times: int) -> tuple[int, list[int]]:
        import imported_late  # type: ignore[import-not-found]

        for _ in range(times + dist.get_rank()):
            imported_late.add()
        dist.all_reduce(torch.zeros(1))
        return imported_late.count, imported_late.counts

    simulation = Simulation(2, modules=("imported_late",))
    simulation.run(dict.fromkeys(range(2), lambda: dist.init_process_group("gloo")))
    assert simulation.run(dict.fromkeys(range(2), lambda: compute(1))) == {0: (1, [1]), 1: (2, [1, 2])}
    assert simulation.run(dict.fromkeys(range(2), lambda: compute(0))) == {0: (1, [1]), 1: (3, [1, 2, 3])}
    simulation.close()
    assert "imported_late" not in sys.modules


def test_a_rank_has_the_training_globals_of_a_module_that_it_imports_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "megatron.training.global_vars"  # only a checkout of Megatron-LM has it
    folder = tmp_path / "megatron" / "training"
    folder.mkdir(parents=True)
    (folder / "global_vars.py").write_text("_GLOBAL_ARGS = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)
    module._GLOBAL_ARGS = "of the process"

    def compute() -> list[int | None]:
        before = module._GLOBAL_ARGS
        module._GLOBAL_ARGS = dist.get_rank()
        dist.barrier()
        return [before, module._GLOBAL_ARGS]

    assert run_ranks(3, compute, modules=[name]) == [[None, 0], [None, 1], [None, 2]]
    assert module._GLOBAL_ARGS == "of the process"


def test_an_error_at_the_switch_to_a_rank_ends_the_run() -> None:
    def switch(rank: int) -> None:
        raise OSError(f"no state of rank {rank}")

    scheduler = Scheduler(3, None, switch, lambda: SimulationError("deadlock", ranks=()), lambda rank, error: None)
    computed = list[int]()
    scheduler.run({rank: partial(computed.append, rank) for rank in range(3)})
    assert isinstance(scheduler.failure, OSError)
    assert computed == []
