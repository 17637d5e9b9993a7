"""Parts a and e: the cases of the parity tests on a GPU beside the CPU, and over NCCL beside one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from workers.gpucheck.cases import LAYOUTS, ONE_PROCESS, ROWS, SMALL, Case
from workers.gpucheck.computed import TOLERANCES, at_checkpoint, computed, difference, differences, generated, largest
from workers.gpucheck.policy import Session
from workers.gpucheck.ranks import Job, alone, on_ranks
from workers.gpucheck.rows import Row, at_most, judged
from workers.memory.without_gpus import without_gpus

SIZES = SMALL | {"hidden_size": 128, "ffn_hidden_size": 256, "transformer_impl": "local"}
"""Fields of ModelConfig: widths that kernels of a GPU accept, and a vocabulary that tp does not divide."""
LAYERS = ["local", "transformer_engine"] if HAVE_TE else ["local"]
"""The implementations of layers that this machine can use; a run uses the last."""
DTYPES = ("float32", "bfloat16")
_ADVICE = "the first of scores, tokens and updates that fails has the cause; see docs/gpu.md, 'If a row fails'"
LIMITS: dict[str, dict[str, float]] = {
    # 24 bits of mantissa: sums of a few hundred terms in another order differ by 1e-6 of their size. Adam divides by
    # the gradient's own size, so an update enlarges that. A row of tokens differs if two tokens are nearly as likely.
    "float32": {"scores": 2e-4, "after": 5e-3, "generation against scoring": 2e-4, "loss": 2e-3, "gradient norm": 2e-3}
    | {"weights": 2e-4, "greedy": 1, "sampled": 2, "again": 2e-3},
    # 11 bits of mantissa: Transformer Engine multiplies float32 matrices in TF32.
    "tf32": {"scores": 5e-3, "after": 2e-2, "generation against scoring": 5e-3, "loss": 5e-2, "gradient norm": 5e-2}
    | {"weights": 2e-3, "greedy": ROWS // 2, "sampled": ROWS, "again": 5e-3},
    # 8 bits of mantissa: hidden states are rounded after every operation, to 0.4% of their size.
    "bfloat16": {"scores": 2e-2, "after": 0.3, "generation against scoring": 2e-2, "loss": 0.2, "gradient norm": 0.2}
    | {"again": 2e-2},
}
"""Largest accepted differences of two devices by precision of the arithmetic, and of one device that computes again."""


def on_one_device(case: Case, dtype: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Generate, score and train on one rank: what ``generated`` and ``computed`` return."""
    return generated(case, dtype, sizes) | computed(case, dtype, sizes)


def parity(session: Session) -> Iterator[Row]:
    """Compare every case of one process with the CPU: both get the same weights, batch and random numbers."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    runs = [(name, dtype) for name in (["dense"] if session.tiny else ONE_PROCESS) for dtype in DTYPES]
    on_cpu = without_gpus(alone)([_job(on_one_device, name, dtype) for name, dtype in runs])
    for (name, dtype), expected in zip(runs, on_cpu, strict=True):
        for layers in LAYERS:
            [results] = alone([_job(on_one_device, name, dtype, layers)])
            yield from case_rows(_name(name, dtype, layers), _precision(dtype, layers), results, expected)


def _job(function: Callable[..., Any], case: str, dtype: str, layers: str = "local", *arguments: Any) -> Job:
    return function, ONE_PROCESS[case], dtype, SIZES | {"transformer_impl": layers}, *arguments


def _name(case: str, dtype: str, layers: str) -> str:
    return f"{case} {dtype}" + (" TE" if layers != "local" else "")


def _precision(dtype: str, layers: str) -> str:
    return "tf32" if dtype == "float32" and layers != "local" else dtype


def case_rows(name: str, precision: str, results: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[Row]:
    """Compare what was computed ``on_one_device`` with the expected results.

    Weights are compared if both have a parameter of the name: fused layers of Transformer Engine name norms otherwise.
    """
    common = results["weights"].keys() & expected["weights"].keys()
    results, expected = (dict(it, weights={name: it["weights"][name] for name in common}) for it in (results, expected))
    for quantity, limit in LIMITS[precision].items():
        if quantity == "again":
            continue
        ours, theirs = results[quantity], expected[quantity]
        if quantity == "generation against scoring":
            value = ours  # on this device
        elif quantity in ("greedy", "sampled"):
            value = len(theirs) if ours.shape != theirs.shape else int((ours != theirs).any(1).sum())
        elif quantity in ("scores", "after"):
            value = score_difference(precision, ours, theirs)
        else:
            value = difference(ours, theirs, relative=quantity == "gradient norm")
        yield at_most(f"{quantity} {name}", value, limit, _ADVICE)


def score_difference(precision: str, scores: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of log-probabilities in float32, and their mean if arithmetic is less precise.

    A token that is nearly as close to another expert may go there, so single log-probabilities differ by more.
    """
    if precision == "float32" or scores.shape != expected.shape:
        return difference(scores, expected)
    return float((scores.double() - expected.double()).abs().sum() / (expected != 0).sum().clamp(min=1))  # 0 is padding


def checkpoints(session: Session) -> Iterator[Row]:
    """Continue from a checkpoint of the same device, from the CPU on the GPU, and from the GPU on the CPU."""

    def job(dtype: str, layers: str, saved_by: str, load: bool = True) -> Job:
        return _job(at_checkpoint, "dense", dtype, layers, str(session.folder / f"{saved_by} {dtype}"), load)

    def row(how: str, dtype: str, layers: str, continued: Any, expected: Any, kind: str) -> Row:
        precision = _precision(dtype, layers)
        value = score_difference(precision, continued["scores"], expected["scores"])
        advice = "the continued run differs: updates must pass first, then the optimizer's state"
        return at_most(f"checkpoint {_name('dense', dtype, layers)}, {how}", value, LIMITS[precision][kind], advice)

    saved_on_cpu = without_gpus(alone)([job(dtype, "local", "cpu", load=False) for dtype in DTYPES])
    for dtype, on_cpu in zip(DTYPES, saved_on_cpu, strict=True):
        for layers in LAYERS:
            jobs = [job(dtype, layers, layers, load=False), job(dtype, layers, layers), job(dtype, layers, "cpu")]
            saved, resumed, from_cpu = alone(jobs)
            yield row("resumed", dtype, layers, resumed, saved, "again")
            yield row("from the CPU", dtype, layers, from_cpu, on_cpu, "after")
    back = without_gpus(alone)([job(dtype, "local", "local") for dtype in DTYPES])
    for dtype, on_cpu, to_cpu in zip(DTYPES, saved_on_cpu, back, strict=True):
        yield row("to the CPU", dtype, "local", to_cpu, on_cpu, "after")


_OVERLAP, _DISTRIBUTED = "PP2 x DP2, distributed optimizer with overlap", "DP2, distributed optimizer"
IN_BFLOAT16 = ("TP2 with SP, packed", _OVERLAP, "CP2", "EP2, decisive routers")
"""Layouts that are compared in bfloat16 too, with Transformer Engine if it is installed."""


def layouts(session: Session) -> Iterator[Row]:
    """Compare layouts with one process, and read the checkpoint of one layout in another."""
    jobs: dict[tuple[str, str], Job] = {}
    in_bfloat16 = () if session.tiny else IN_BFLOAT16
    for dtype, names in {"float32": ["TP2"] if session.tiny else LAYOUTS, "bfloat16": in_bfloat16}.items():
        sizes = SIZES | {"transformer_impl": LAYERS[-1] if dtype == "bfloat16" else "local"}
        for name in names:
            case = LAYOUTS[name]
            jobs[case.model, dtype] = computed, Case(model=case.model), dtype, sizes
            jobs[name, dtype] = computed, case, dtype, sizes
    results: dict[tuple[str, str], list[Any] | str] = {}
    for (name, dtype), ranks in zip(jobs, on_ranks(list(jobs.values())), strict=True):
        results[name, dtype] = ranks
        if name in LAYOUTS:
            layers = jobs[name, dtype][3]["transformer_impl"]
            yield _layout_row(f"{name} {dtype} {layers}", dtype, results[LAYOUTS[name].model, dtype], ranks)
    if not session.tiny:
        for saved, loaded in ((_OVERLAP, _DISTRIBUTED), (_DISTRIBUTED, _OVERLAP)):
            yield _checkpoint_row(saved, loaded, str(session.folder / f"layout{time.monotonic_ns()}"))


def _layout_row(name: str, dtype: str, expected: list[Any] | str, ranks: list[Any] | str) -> Row:
    if isinstance(expected, str) or isinstance(ranks, str):
        error = expected if isinstance(expected, str) else str(ranks)
        return judged(name, False, "equal to one process", error[:400])
    backend, by_quantity = ranks[0]["backend"], differences(expected[0], ranks)
    advice = f"this layout computes something else over {backend} than one process"
    figures = {quantity.replace(" ", "_"): value for quantity, value in by_quantity.items()}
    return at_most(name, largest(by_quantity.values()), TOLERANCES[dtype], advice, backend=backend, **figures)


def _checkpoint_row(saved: str, loaded: str, path: str) -> Row:
    jobs = [(at_checkpoint, LAYOUTS[name], "float32", SIZES, path, name == loaded) for name in (saved, loaded)]
    scores = []
    for ranks in on_ranks(jobs):
        if isinstance(ranks, str):
            return judged(f"{saved}, read by {loaded}", False, "equal scores", ranks[:400])
        by_shard = {rank["dp"]: rank["scores"] for rank in ranks if rank["scores"] is not None}
        scores.append(torch.cat([by_shard[shard] for shard in sorted(by_shard)], 1))
    advice = "a checkpoint of one layout is another model in the other"
    return at_most(f"{saved}, read by {loaded}", difference(*scores), TOLERANCES["float32"], advice)
