"""Part a: versions, the kernels of attention, and scores, tokens, updates and checkpoints against the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workers.gpucheck.case_run import BATCH, CaseRun, Session, can_save, continue_case, run_case
from workers.gpucheck.cases import ONE_PROCESS, ROWS
from workers.gpucheck.policy import Policy, actor_config
from workers.gpucheck.rows import Row, at_most, judged, measured, raised, skipped

_ATTENTION = re.compile(r"flash|fmha|cudnn.*(sdpa|attention)|attn_fwd", re.IGNORECASE)
_ADVICE = "the first of scores, tokens and updates that fails has the cause; see docs/gpu.md, 'If a row fails'"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest accepted differences between two devices.

    Attributes:
        mean: whether differences of log-probabilities are averaged over tokens; otherwise the largest one counts.
        scores: of log-probabilities with equal weights, also between generation and scoring.
        weights: of parameters after the updates, whose steps are up to 1e-3 each; None if rounding hides steps.
        after: of log-probabilities after the updates.
        metrics: of gradient norms and losses, relative to 1 or to the value if it is larger.
        rows: rows of tokens that may differ, of ``ROWS``.
        again: of log-probabilities after the updates, computed twice on one device.
    """

    mean: bool
    scores: float
    weights: float | None
    after: float
    metrics: float
    rows: int
    again: float


TOLERANCES: dict[str, Tolerance] = {
    # 24 bits of mantissa: sums of a few hundred terms in another order differ by 1e-6 of their size. Adam divides by
    # the gradient's own size, so an update enlarges that. A row of tokens differs if two tokens are nearly as likely.
    "float32": Tolerance(mean=False, scores=2e-4, weights=2e-4, after=5e-3, metrics=2e-3, rows=1, again=2e-3),
    # 11 bits of mantissa: Transformer Engine multiplies float32 matrices in TF32.
    "tf32": Tolerance(mean=True, scores=5e-3, weights=2e-3, after=2e-2, metrics=5e-2, rows=ROWS // 2, again=5e-3),
    # 8 bits of mantissa: hidden states are rounded after every operation, to 0.4% of their size. A token that is nearly
    # as close to another expert may go there, so single log-probabilities differ by more, and their mean is compared.
    "bfloat16": Tolerance(mean=True, scores=2e-2, weights=None, after=0.3, metrics=0.2, rows=ROWS, again=2e-2),
}
"""Tolerances by precision of the arithmetic."""


def attention(session: Session) -> Iterator[Row]:
    """Name the kernels of attention in an update, with heads as wide as in large models."""
    for case in ("dense", "packed"):
        settings = CaseRun(case, "bfloat16", session.implementation).settings()
        settings["model"] |= {"num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 128}
        with Policy(actor_config(settings), "actor") as policy, torch.profiler.profile() as profile:
            policy.update(BATCH)
        kernels = sorted({event.key[:60] for event in profile.key_averages() if _ATTENTION.search(event.key)})
        figures = {"layers": session.implementation, "kernels": ", ".join(kernels[:3]) or "none that is fused"}
        if session.implementation == "local":
            yield measured(f"attention, {case}", **figures)
            continue
        advice = "Transformer Engine materializes the weights of attention: see NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2"
        yield judged(f"attention, {case}", bool(kernels), "flash or fused", advice, **figures)


def equality(session: Session) -> Iterator[Row]:
    """Compare every case with the CPU: both get the same weights, batch and random numbers."""
    cases = ["dense"] if session.tiny else list(ONE_PROCESS)
    cpu_runs = [CaseRun(case, dtype) for case in cases for dtype in ("float32", "bfloat16")]
    expected = {run: session.cpu.submit(run_case, run, session.cpu_folder) for run in cpu_runs}
    found = {}
    for run in [replace(run, implementation=layers) for run in cpu_runs for layers in session.layers]:
        try:
            found[run] = run_case(run, session.folder)
            yield from case_rows(run, found[run], expected[run.on_cpu]())
        except Exception as error:  # one kind of model that fails says nothing about the others
            yield raised(str(run), error)
    if not can_save():
        yield skipped("checkpoints", "psutil, which Megatron-Core saves with, is not installed")
        return
    for run in [run for run in found if run.case == "dense"]:
        yield from _checkpoint_rows(session, run, found[run]["after"], expected[run.on_cpu]()["after"])


def _checkpoint_rows(session: Session, run: CaseRun, own: Tensor, on_cpu: Tensor) -> Iterator[Row]:
    """Continue from the checkpoints of both runs; ``own`` and ``on_cpu`` are their scores at the end."""
    tolerance = _tolerance(run)
    results = [("resumed", continue_case(run, session.folder / str(run)), own, tolerance.again)]
    moved = continue_case(run, session.cpu_folder / str(run.on_cpu))
    results.append(("from the CPU", moved, on_cpu, tolerance.after))
    if run == run.on_cpu:
        there = session.cpu.submit(continue_case, run, session.folder / str(run))()
        results.append(("to the CPU", there, on_cpu, tolerance.after))
    advice = "the continued run differs: updates must pass first, then the optimizer's state"
    for how, value, expected, limit in results:
        yield at_most(f"checkpoint {run}, {how}", score_difference(value, expected, tolerance), limit, advice)


def case_rows(run: CaseRun, found: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[Row]:
    """Compare the results of a run with the expected ones, for the results that ``found`` has: see ``run_case``.

    Weights are compared if both have a parameter of the name: fused layers of Transformer Engine name norms otherwise.
    """
    tolerance = _tolerance(run)
    for kind, limit in (("scores", tolerance.scores), ("after", tolerance.after)):
        yield at_most(f"{kind} {run}", score_difference(found[kind], expected[kind], tolerance), limit, _ADVICE)
    for kind in ("greedy", "sampled"):
        if kind in found and tolerance.rows < ROWS:
            ours, theirs = found[kind], expected[kind]
            differ = len(theirs) if ours.shape != theirs.shape else int((ours != theirs).any(1).sum())
            yield at_most(f"{kind} rows that differ {run}", differ, tolerance.rows * len(theirs) // ROWS, _ADVICE)
    if "drift" in found:
        advice = "generation and scoring disagree on this device: the cache or the attention of generation is wrong"
        yield at_most(f"generation against scoring {run}", found["drift"], tolerance.scores, advice)
        metrics = _metric_difference(found["metrics"], expected["metrics"])
        yield at_most(f"metrics {run}", metrics, tolerance.metrics, _ADVICE)
    if "weights" in found and tolerance.weights is not None:
        ours, theirs = found["weights"], expected["weights"]
        largest = _largest([_difference(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()])
        yield at_most(f"weights {run}", largest, tolerance.weights, _ADVICE)


def score_difference(value: Tensor, expected: Tensor, tolerance: Tolerance) -> float:
    """Return the mean or the largest difference of log-probabilities, ``[rows, response]``; 0 is padding in both."""
    if not tolerance.mean or value.shape != expected.shape:
        return _difference(value, expected)
    return float((value.double() - expected.double()).abs().sum() / (expected != 0).sum().clamp(min=1))


def _tolerance(run: CaseRun) -> Tolerance:
    uses_tf32 = run.dtype == "float32" and run.implementation == "transformer_engine"
    return TOLERANCES["tf32" if uses_tf32 else run.dtype]


def _difference(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected.double()).abs().max()) if value.shape == expected.shape else float("inf")


def _metric_difference(value: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]]) -> float:
    """The largest difference of a metric, except of the largest ratio of one token, and of what only a GPU has."""
    return _largest(
        [
            abs(ours[name] - theirs[name]) / max(1.0, abs(theirs[name]))
            for ours, theirs in zip(value, expected, strict=True)
            for name in theirs
            if name != "ratio_max"
        ]
    )


def _largest(values: Sequence[float]) -> float:
    """The largest of the values; NaN if one is NaN, or if there is none."""
    return float(torch.tensor(values, dtype=torch.float64).max()) if values else float("nan")
