"""Peaks of dry runs beside real runs on the CPU, whose storages are counted in the same way, and its allocator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils, router
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _disable_current_modes

from parallel_state import cpu
from parallel_state.dry_run import DoesNotFit, DryRunError, counting, dry_run
from parallel_state.dry_run.counting import CountingMode
from parallel_state.dry_run.memory import Memory
from parallel_state.dry_run.outcome import Use, gpu_bytes
from parallel_state.dry_run.routing import routing_of
from parallel_state.dry_run.run import layout_for
from parallel_state.dry_run.training import train
from parallel_state.simulated import exchange, run_ranks
from parallel_state.verify import Program, VerifyError
from parallel_state.verify.layouts import parse_layout
from tests.parallel_state.verify.programs import GPT, MOE, smaller

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
]
WIDE = {"hidden_size": 256, "ffn_hidden_size": 512, "kv_channels": 64}
ROUTING = "topk_routing_with_score_function"


@pytest.fixture(autouse=True)
def collectives_of_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not count what the simulator allocates to compute a collective, in the rank that comes last."""
    compute = exchange.compute

    def uncounted(calls: Any) -> None:
        if len(calls) > 1 or calls[0].operation != "all_reduce":  # of one rank: nothing to do
            with _disable_current_modes():
                compute(calls)

    monkeypatch.setattr(exchange, "compute", uncounted)


def counted(program: Program, layout: str) -> list[Use]:
    """Return what each rank of a real run used."""

    def on_rank() -> Use:
        mode = CountingMode(Memory(), "cpu")
        with mode:
            return train(program, parse_layout(layout), torch.float32, "local", mode)

    return run_ranks(parse_layout(layout).layout, on_rank, check_async=False)


def widened(program: Program, **fields: Any) -> Program:
    """Return the program with wider layers: then numbers on the host are few of the bytes."""

    def config(**parallel: Any) -> Any:
        made = program.config(**parallel)
        for name, value in (WIDE | fields).items():
            setattr(made, name, value)
        return made

    return smaller(program, config=config, num_layers=fields.get("num_layers", 2))


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        ("dp=1", {}),
        ("tp=2,pp=2,sp", {}),
        ("dp=2,distopt", {}),
        ("cp=2", {}),
        ("tp=2,sp", FULL),
        ("pp=2", SELECTIVE),
        ("pp=2,vpp=2", {"num_layers": 4}),
    ],
)
def test_the_peak_of_a_dense_model_is_that_of_a_real_run(layout: str, fields: dict[str, Any]) -> None:
    program = widened(GPT, **fields)
    dry = dry_run(program, layout, dtype=torch.float32, layers="local", every_rank=True)
    for rank, use in enumerate(counted(program, layout)):
        assert dry.uses[rank].peak == pytest.approx(use.peak, rel=1e-3)
        assert dry.uses[rank].weights == use.weights


@pytest.mark.parametrize("routing", ["balanced", "skewed"])
def test_the_peak_of_experts_is_that_of_a_real_run(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = routing_of(routing)

    def route(logits: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> Any:
        chosen = choose(*logits.shape, topk).to(logits.device)
        return torch.softmax(logits, -1) * chosen, chosen

    for module in (moe_utils, router):
        monkeypatch.setattr(module, ROUTING, route)
    program, layout = widened(MOE, moe_ffn_hidden_size=128), "pp=2,ep=2,distopt"
    dry = dry_run(program, layout, routing=routing, dtype=torch.float32, layers="local", every_rank=True)
    for rank, use in enumerate(counted(program, layout)):
        assert dry.uses[rank].peak == pytest.approx(use.peak, rel=1e-3)


def test_the_peak_is_that_of_the_allocator() -> None:
    """Within 3%: kernels of the CPU have temporaries of their own."""
    program, variant = widened(GPT, hidden_size=512, ffn_hidden_size=1024), parse_layout("dp=1")

    def on_rank() -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            train(program, variant, torch.float32, "local", CountingMode(Memory(), "none"))
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        now = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        return peak

    (peak,) = run_ranks(variant.layout, on_rank, check_async=False)
    assert dry_run(program, variant, dtype=torch.float32, layers="local").peak == pytest.approx(peak, rel=0.03)


def test_skewed_routing_needs_more_memory_on_the_first_experts() -> None:
    program = dataclasses.replace(widened(MOE, moe_ffn_hidden_size=1024), micro_batches=4)
    balanced, skewed = (dry_run(program, "ep=4", routing=how, every_rank=True) for how in ("balanced", "skewed"))
    assert skewed.uses[0].peak > balanced.uses[0].peak
    assert skewed.uses[0].peak > skewed.uses[3].peak


def test_a_recorded_count_decides_where_tokens_go(tmp_path: Any) -> None:
    path = tmp_path / "counts.pt"
    torch.save(torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 100.0, 100.0]])[:, -4:], path)
    chosen = routing_of(str(path))(64, 4, 2)
    assert chosen.sum(0).tolist() == [0, 0, 64, 64]


def test_recorded_counts_give_the_peak_of_each_rank_of_the_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1%: a layer or micro-batch of the run has some tokens more than another."""
    own, counts, path = getattr(moe_utils, ROUTING), list[torch.Tensor](), tmp_path / "counts.pt"

    def route(logits: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # experts of the first rank are preferred
            _, chosen = own(logits - torch.arange(logits.shape[1]), topk, *args, **kwargs)
            counts.append(chosen.sum(0))
        return torch.softmax(logits, -1) * chosen, chosen

    program, layout = dataclasses.replace(widened(MOE, moe_ffn_hidden_size=1024), micro_batches=4), "ep=4,distopt"
    with monkeypatch.context() as patched:
        for module in (moe_utils, router):
            patched.setattr(module, ROUTING, route)
        real = counted(program, layout)
    torch.save(torch.stack(counts), path)
    dry, balanced = (
        dry_run(program, layout, routing=how, dtype=torch.float32, layers="local", every_rank=True)
        for how in (str(path), "balanced")
    )
    assert real[0].peak > 1.02 * balanced.uses[0].peak
    for rank, use in enumerate(real):
        assert dry.uses[rank].peak == pytest.approx(use.peak, rel=0.01)


def test_a_pipeline_speaks_for_all_ranks() -> None:
    program = widened(GPT)
    one, every = (dry_run(program, "tp=2,pp=2,dp=2,sp", every_rank=flag) for flag in (False, True))
    assert len(one.uses) == 4 and len(every.uses) == 8
    assert {stage: one.uses[rank].peak for stage, rank in one.stages.items()} == {
        stage: every.uses[rank].peak for stage, rank in every.stages.items()
    }
    assert one.calls == every.calls


def test_a_peak_has_kinds_and_a_place() -> None:
    (use,) = dry_run(widened(GPT), "dp=1", dtype=torch.bfloat16).uses.values()
    assert sum(use.by_kind.values()) == use.peak
    parameters = 2 * use.weights
    assert use.idle["parameters"] == pytest.approx(parameters, rel=0.01)
    assert use.idle["gradients"] == pytest.approx(2 * parameters, rel=0.01)
    assert use.idle["optimizer"] == pytest.approx(6 * parameters, rel=0.01)
    assert "megatron/core" in use.line or "workers/model" in use.line


def test_a_peak_above_a_limit_is_an_error() -> None:
    outcome = dry_run(smaller(GPT), "dp=1")
    outcome.require_peak(outcome.peak)
    with pytest.raises(DoesNotFit) as raised:
        outcome.require_peak(outcome.peak - 1)
    assert (raised.value.peak, raised.value.limit) == (outcome.peak, outcome.peak - 1)
    assert outcome.fits(gpu_bytes("H100")) and not outcome.fits(2**29)


def unknown_count(iterator: Any, model: Any) -> Any:
    row = next(iterator)
    torch.rand(2000, device=row["tokens"].device).bool().nonzero()
    return GPT.forward_step(iter([row]), model)


def on_a_real_device(*args: Any, **kwargs: Any) -> Any:
    return GPT.model_provider(*args, **kwargs).to(torch.device("cuda", 0))


def in_fp8(**parallel: Any) -> Any:
    made = GPT.config(**parallel)
    made.fp8 = "hybrid"
    return made


BAD: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "a size that follows from values": (lambda: dry_run(smaller(GPT, forward_step=unknown_count), "dp=1"), DryRunError),
    "a provider that names a real device": (
        lambda: dry_run(smaller(GPT, model_provider=on_a_real_device), "dp=1"),
        DryRunError,
    ),
    "products in FP8": (lambda: dry_run(smaller(GPT, config=in_fp8), "dp=1"), DryRunError),
    "ranks that the axes do not divide": (lambda: layout_for("tp=4,pp=2", 12), DryRunError),
    "dp and another number of ranks": (lambda: layout_for("tp=4,dp=2", 16), DryRunError),
    "micro-batches that dp does not divide": (lambda: dry_run(smaller(GPT), "dp=3"), VerifyError),
    "an unknown axis": (lambda: dry_run(GPT, "xp=3"), VerifyError),
    "an unknown GPU": (lambda: gpu_bytes("H9000"), DryRunError),
    "no such file of counts": (lambda: dry_run(MOE, "ep=2", routing="nowhere.pt"), DryRunError),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_error(name: str) -> None:
    call, error = BAD[name]
    with pytest.raises(error):
        call()


def test_a_function_of_a_rank_may_fail() -> None:
    def provider(*args: Any) -> Any:
        raise RuntimeError("no model")

    outcome = dry_run(smaller(GPT, model_provider=provider), "pp=2")
    assert outcome.failure.startswith("RuntimeError: no model") and "in provider" in outcome.failure


def test_a_process_that_sees_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "install", lambda: False)
    with pytest.raises(DryRunError):
        dry_run(smaller(GPT), "tp=2")


def test_a_machine_whose_memory_is_used_up_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal: {100 << 20} kB\nMemFree: 0 kB\nMemAvailable: {4 << 20} kB\n")
    monkeypatch.setattr(counting, "_SYSTEM_MEMORY", file)
    monkeypatch.setattr(counting, "_OPERATIONS_TO_CHECK", 64)
    with pytest.raises(DryRunError) as error:
        dry_run(smaller(GPT), "tp=2", every_rank=True)
    assert error.value.fields == {"left": 4.0, "total": 100.0}


def test_values_that_a_provider_reads_are_listed_and_a_branch_is_a_warning() -> None:
    def provider(*args: Any, **kwargs: Any) -> Any:
        model = GPT.model_provider(*args, **kwargs)
        first = next(model.parameters())
        if first.norm().item() > 0 and first.sum() > 0:
            raise RuntimeError("a comparison with an unknown value is False")
        return model

    outcome = dry_run(smaller(GPT, model_provider=provider), "dp=1")
    (use,) = outcome.uses.values()
    read = [what for line, what in use.read if "in provider" in line]
    assert len(read) == 2 and any("in provider" in line for line in outcome.warnings)
