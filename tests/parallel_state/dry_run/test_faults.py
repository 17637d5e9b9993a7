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
from parallel_state.dry_run.ranks import CallLog, run_without_data
from parallel_state.dry_run.training import ShapeTraining
from parallel_state.errors import LayoutError
from parallel_state.layout import ParallelLayout
from parallel_state.verify import Program, VerifyError
from tests.parallel_state.verify.programs import GPT, smaller

pytestmark = pytest.mark.simulated


Fault = Callable[[torch.Tensor, bool], Any]
"""Called with the tokens, and whether this rank is one that makes the fault."""


def planted(fault: Fault, *ranks: int) -> Program:
    """Return the program whose forward step calls a fault first, which some ranks make."""

    def forward_step(iterator: Any, model: Any) -> Any:
        row = next(iterator)
        fault(row["tokens"], dist.get_rank() in ranks)
        return GPT.forward_step(iter([row]), model)

    return smaller(GPT, forward_step=forward_step, micro_batches=4)


def another_dtype(tokens: torch.Tensor, is_faulty: bool) -> None:
    values = tokens.float() if is_faulty else tokens.bfloat16()
    dist.all_reduce(values, group=mpu.get_tensor_model_parallel_group())


def another_group(tokens: torch.Tensor, is_faulty: bool) -> None:
    groups = mpu.get_tensor_model_parallel_group, mpu.get_data_parallel_group
    dist.all_reduce(tokens.float(), group=groups[is_faulty]())


def another_order(tokens: torch.Tensor, is_faulty: bool) -> None:
    group = mpu.get_tensor_model_parallel_group()
    calls = [
        lambda: dist.all_reduce(tokens.float(), group=group),
        lambda: dist.broadcast(tokens.float(), group=group, group_src=0),
    ]
    for call in calls[::-1] if is_faulty else calls:
        call()


def a_rank_that_leaves(tokens: torch.Tensor, is_faulty: bool) -> None:
    if not is_faulty:
        dist.all_reduce(tokens.float(), group=mpu.get_tensor_model_parallel_group())


def other_split_sizes(tokens: torch.Tensor, is_faulty: bool) -> None:
    sizes = [1, 3] if is_faulty else [2, 2]
    dist.all_to_all_single(
        tokens.new_empty(4), tokens.new_empty(4), sizes, sizes, mpu.get_tensor_model_parallel_group()
    )


def two_groups_in_another_order(tokens: torch.Tensor, is_faulty: bool) -> None:
    groups = [mpu.get_tensor_model_parallel_group(), mpu.get_data_parallel_group()]
    for work in [
        dist.all_reduce(tokens.float(), group=group, async_op=True) for group in (groups[::-1] if is_faulty else groups)
    ]:
        work.wait()


def another_length(tokens: torch.Tensor, is_faulty: bool) -> None:
    dist.all_reduce(tokens[:, : 8 if is_faulty else 16].float(), group=mpu.get_data_parallel_group())


CALLS: list[tuple[Fault, tuple[int, ...], str, tuple[int, ...], str]] = [
    (another_dtype, (1,), "tp=2", (5,), "CollectiveMismatch"),
    (another_group, (3,), "tp=2,dp=2", (5,), "Deadlock"),
    (another_order, (1,), "tp=2", (5,), "CollectiveMismatch"),
    (a_rank_that_leaves, (1,), "tp=2", (5,), "CollectiveMismatch"),
    (other_split_sizes, (1,), "tp=2", (5,), "CollectiveMismatch"),
    (two_groups_in_another_order, (1, 2), "tp=2,dp=2", (3, 4), "GroupOrderError"),
    (another_length, (1,), "dp=2", (5,), "CollectiveMismatch"),
]
"""A fault, the ranks that make it in a layout, those that make it in tp=2,dp=4, and the error."""


@pytest.mark.parametrize(("fault", "ranks", "layout", "others", "error"), CALLS)
def test_a_fault_in_a_call_is_named_with_its_line(
    fault: Fault, ranks: tuple[int, ...], layout: str, others: tuple[int, ...], error: str
) -> None:
    outcome = dry_run(planted(fault, *ranks), layout, every_rank=True)
    assert outcome.failure.startswith(error)
    assert f"{Path(__file__).name}:" in outcome.failure


@pytest.mark.parametrize(("fault", "ranks", "layout", "others", "error"), CALLS)
def test_a_fault_on_ranks_of_no_pipeline_is_found_with_one_layer_on_each_stage(
    fault: Fault, ranks: tuple[int, ...], layout: str, others: tuple[int, ...], error: str
) -> None:
    outcome = dry_run(planted(fault, *others), "tp=2,dp=4")  # pipelines are ranks 0 and 7
    assert not outcome.fits(2**60) and f"{error}: " in outcome.failure
    assert f"{Path(__file__).name}:" in outcome.failure and all(str(rank) in outcome.failure for rank in others)
    assert not dry_run(planted(fault, *others), "tp=2,dp=4", second=False).failure


def test_an_error_of_a_rank_that_runs_alone_has_its_type_and_fields() -> None:
    def fail(mode: Any) -> None:
        if dist.get_rank() == 5:
            raise LayoutError("no layout", tp=3)

    counts = list[int]()
    with pytest.raises(LayoutError) as error:
        run_without_data(ParallelLayout(8, tp=2), range(8), fail, CallLog(), together=False, ended=counts.append)
    assert (error.value.fields, counts) == ({"tp": 3}, [1, 2, 3, 4, 5])


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
    def conditional(tokens: torch.Tensor, is_faulty: bool) -> None:
        if float(torch.rand(2000, device=tokens.device).sum()) > 2.0:
            dist.all_reduce(tokens.float(), group=mpu.get_tensor_model_parallel_group())

    (use, *_) = dry_run(planted(conditional), "tp=2", every_rank=True).uses.values()
    assert any("in conditional" in line for line, _ in use.read)


def test_a_value_of_which_a_part_is_overwritten_is_listed() -> None:
    def partly(tokens: torch.Tensor, is_faulty: bool) -> None:
        sums = torch.zeros(2, device=tokens.device)
        sums[0] = torch.rand(2000, device=tokens.device).sum()
        assert 1 / sums[0].item() + 1 / sums.sum().item() == 2.0

    (use, *_) = dry_run(planted(partly), "tp=2", second=False).uses.values()
    assert sum(times for (line, _), times in use.read.items() if "in partly" in line) == 2 * 4


def test_what_a_rank_broadcasts_is_known_to_ranks_of_other_pipelines() -> None:
    def counted(tokens: torch.Tensor, is_faulty: bool) -> None:
        group, new = mpu.get_tensor_model_parallel_group(), torch.empty if dist.get_rank() % 2 else torch.zeros
        count = new((), dtype=torch.int64, device=tokens.device)
        dist.broadcast(count, group=group, group_src=0)
        assert int(count) == 0

    outcome = dry_run(planted(counted), "tp=2,dp=4")
    assert (outcome.failure, outcome.warnings) == ("", [])
    assert not any("in counted" in line for use in outcome.uses.values() for line, _ in use.read)


@pytest.mark.parametrize("rank", [0, 5])
def test_a_missing_wait_is_a_warning_with_its_line(rank: int) -> None:
    def unfinished(tokens: torch.Tensor, is_faulty: bool) -> None:
        work = dist.all_reduce(tokens.float(), group=mpu.get_tensor_model_parallel_group(), async_op=True)
        if not is_faulty:
            work.wait()

    outcome = dry_run(planted(unfinished, rank), "tp=2,dp=4")
    assert not outcome.failure
    assert any("in unfinished" in warning for warning in outcome.warnings)


def reducing(tokens: torch.Tensor, is_faulty: bool) -> None:
    if is_faulty:
        dist.all_reduce(tokens.float(), group=mpu.get_tensor_model_parallel_group())


def test_ranks_that_agree_on_another_call_are_a_warning() -> None:
    assert dry_run(planted(reducing, 2, 3), "tp=2,dp=2").warnings
    assert not dry_run(planted(reducing), "tp=2,dp=2").warnings
    (warning,) = dry_run(planted(reducing, 4, 5), "tp=2,pp=2,dp=4").warnings  # pipelines are ranks 0 and 8, 7 and 15
    assert "[4, 5]" in warning
