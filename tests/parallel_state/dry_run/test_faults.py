"""Planted faults: which of them a dry run names, and which it cannot see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from parallel_state.dry_run import Outcome, dry_run
from parallel_state.dry_run.training import ShapeTraining
from parallel_state.verify import Program, VerifyError
from tests.parallel_state.verify.programs import GPT, smaller

pytestmark = pytest.mark.simulated


def first_of(axis: str) -> bool:
    coordinates = {"tp": mpu.get_tensor_model_parallel_rank, "dp": mpu.get_data_parallel_rank}
    return coordinates[axis]() == 0


def before_the_forward(fault: Callable[[torch.Tensor], Any]) -> Any:
    """Return the program whose forward step calls a function with the tokens first."""

    def forward_step(iterator: Any, model: Any) -> Any:
        row = next(iterator)
        fault(row["tokens"])
        return GPT.forward_step(iter([row]), model)

    return smaller(GPT, forward_step=forward_step)


def of_another_dtype(tokens: torch.Tensor) -> None:
    values = tokens.float() if first_of("tp") else tokens.bfloat16()
    dist.all_reduce(values, group=mpu.get_tensor_model_parallel_group())


def of_another_group(tokens: torch.Tensor) -> None:
    groups = mpu.get_tensor_model_parallel_group, mpu.get_data_parallel_group
    dist.all_reduce(tokens.float(), group=groups[dist.get_rank() == 3]())


def in_another_order(tokens: torch.Tensor) -> None:
    group = mpu.get_tensor_model_parallel_group()
    calls = [
        lambda: dist.all_reduce(tokens.float(), group=group),
        lambda: dist.broadcast(tokens.float(), group=group, group_src=0),
    ]
    for call in calls if first_of("tp") else calls[::-1]:
        call()


def on_one_rank_only(tokens: torch.Tensor) -> None:
    if first_of("tp"):
        dist.all_reduce(tokens.float(), group=mpu.get_tensor_model_parallel_group())


def with_other_splits(tokens: torch.Tensor) -> None:
    sizes = [1, 3] if first_of("tp") else [2, 2]
    dist.all_to_all_single(
        tokens.new_empty(4), tokens.new_empty(4), sizes, sizes, mpu.get_tensor_model_parallel_group()
    )


def of_two_groups_in_another_order(tokens: torch.Tensor) -> None:
    groups = [mpu.get_tensor_model_parallel_group(), mpu.get_data_parallel_group()]
    groups = groups if first_of("tp") == first_of("dp") else groups[::-1]
    for work in [dist.all_reduce(tokens.float(), group=group, async_op=True) for group in groups]:
        work.wait()


CALLS = {
    "another dtype": (of_another_dtype, "tp=2", "CollectiveMismatch"),
    "another group": (of_another_group, "tp=2,dp=2", "Deadlock"),
    "another order": (in_another_order, "tp=2", "CollectiveMismatch"),
    "a rank that leaves": (on_one_rank_only, "tp=2", "CollectiveMismatch"),
    "other split sizes": (with_other_splits, "tp=2", "CollectiveMismatch"),
    "two groups in another order": (of_two_groups_in_another_order, "tp=2,dp=2", "GroupOrderError"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_fault_in_a_call_is_named_with_its_line(name: str) -> None:
    fault, layout, error = CALLS[name]
    outcome = dry_run(before_the_forward(fault), layout, every_rank=True)
    assert outcome.failure.startswith(error)
    assert Path(__file__).name in outcome.failure


def failed(outcome: Outcome, error: str) -> bool:
    return outcome.failure.startswith(error) and not outcome.fits(2**60)


def test_another_length_on_one_stage_is_named() -> None:
    def batch(index: int) -> Any:
        kept = 8 if mpu.is_pipeline_first_stage(ignore_virtual=True) else 16
        return {name: value[:, :kept].contiguous() for name, value in GPT.batch(index).items()}

    assert failed(dry_run(smaller(GPT, batch=batch), "pp=2"), "CollectiveMismatch")


def test_another_number_of_micro_batches_on_one_stage_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ShapeTraining, "micro_batches", lambda self, step: range(2 + mpu.is_pipeline_last_stage(ignore_virtual=True))
    )
    assert failed(dry_run(smaller(GPT), "pp=2"), "Deadlock")


def test_embeddings_that_one_stage_does_not_tie_are_a_deadlock() -> None:
    def provider(config: Any, first: bool, last: bool, stage: Any = None) -> Any:
        model = GPT.model_provider(config, first, last, stage)
        model.share_embeddings_and_output_weights = first
        return model

    assert failed(dry_run(smaller(GPT, model_provider=provider), "pp=2"), "Deadlock")


def test_layers_that_stages_do_not_divide_are_an_error() -> None:
    with pytest.raises(VerifyError):
        dry_run(smaller(GPT, num_layers=3), "pp=2")


def test_a_value_that_decides_about_a_collective_is_listed() -> None:
    def conditional(tokens: torch.Tensor) -> None:
        if float(torch.rand(2000, device=tokens.device).sum()) > 2.0:
            dist.all_reduce(tokens.float(), group=mpu.get_tensor_model_parallel_group())

    (use, *_) = dry_run(before_the_forward(conditional), "tp=2", every_rank=True).uses.values()
    assert any("in conditional" in line for line, _ in use.read)


def test_a_missing_wait_is_a_warning_with_its_line() -> None:
    def unfinished(tokens: torch.Tensor) -> None:
        dist.all_reduce(tokens.float(), group=mpu.get_tensor_model_parallel_group(), async_op=True)

    outcome = dry_run(before_the_forward(unfinished), "tp=2", every_rank=True)
    assert not outcome.failure
    assert any("in unfinished" in warning for warning in outcome.warnings)


def test_ranks_that_do_other_things_than_those_that_ran_first_are_a_warning() -> None:
    def on_last(tokens: torch.Tensor) -> None:
        if not first_of("dp"):
            dist.all_reduce(tokens.float(), group=mpu.get_tensor_model_parallel_group())

    assert dry_run(before_the_forward(on_last), "tp=2,dp=2").warnings
    assert not dry_run(smaller(GPT), "tp=2,dp=2").warnings


def on_ranks(*ranks: int) -> Program:
    """Return the program of which some ranks call another collective."""

    def fault(tokens: torch.Tensor) -> None:
        if dist.get_rank() in ranks:
            dist.all_reduce(tokens.float(), group=mpu.get_tensor_model_parallel_group())

    return before_the_forward(fault).smaller(micro_batches=4)


def test_a_fault_on_a_rank_of_no_pipeline_that_ran_is_found_with_one_layer_on_each_stage() -> None:
    outcome = dry_run(on_ranks(5), "tp=2,pp=2,dp=4")  # pipelines are ranks 0 and 8, 7 and 15
    assert "CollectiveMismatch" in outcome.failure and not outcome.fits(2**60)
    assert "rank 5" in outcome.failure and "in fault" in outcome.failure
    assert not dry_run(on_ranks(5), "tp=2,pp=2,dp=4", second=False).failure


def test_ranks_of_no_pipeline_that_agree_on_another_call_are_a_warning() -> None:
    (warning,) = dry_run(on_ranks(4, 5), "tp=2,pp=2,dp=4").warnings
    assert "[4, 5]" in warning
