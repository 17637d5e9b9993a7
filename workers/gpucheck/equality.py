"""Parts a and e: the cases of the parity tests on a GPU beside the CPU, and over NCCL beside one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE

from workers.gpucheck.ranks import Job, on_ranks, results_of
from workers.gpucheck.rows import NO_ERROR, Row
from workers.gpucheck.scale import Session
from workers.memory.without_gpus import without_gpus
from workers.parity.cases import LAYOUTS, ONE_PROCESS, ROWS, SMALL, Case
from workers.parity.computed import QUANTITIES, TOLERANCES, at_checkpoint, computed, differences

SIZES = SMALL | {"hidden_size": 128, "ffn_hidden_size": 256, "transformer_impl": "local"}
"""Fields of ModelConfig: widths that kernels of a GPU accept, and a vocabulary that tp does not divide."""
LAYERS = ["local", "transformer_engine"] if HAVE_TE else ["local"]
"""The implementations of layers that this machine can use; a run uses the last."""
LIMITS: dict[str, dict[str, float]] = {
    # 24 bits of mantissa: sums of a few hundred terms in another order differ by 1e-6 of their size. Adam divides by
    # the gradient's own size, so an update enlarges that. A row of tokens differs if two tokens are nearly as likely.
    "float32": {"scores": 2e-4, "after": 5e-3, "generation": 2e-4, "loss": 2e-3, "gradient norm": 2e-3}
    | {"weights": 2e-4, "greedy": 1, "sampled": 2},
    # 11 bits of mantissa: Transformer Engine multiplies float32 matrices in TF32. Its layers name norms otherwise.
    "tf32": {"mean of scores": 5e-3, "mean after": 2e-2, "generation": 5e-3, "loss": 5e-2, "gradient norm": 5e-2}
    | {"greedy": ROWS // 2, "sampled": ROWS},
    # 8 bits of mantissa: hidden states are rounded after every operation, to 0.4% of their size.
    "bfloat16": {"mean of scores": 2e-2, "mean after": 0.3, "generation": 2e-2, "loss": 0.2, "gradient norm": 0.2},
}
"""Largest accepted differences of a GPU from the CPU, by precision of the arithmetic."""


def compared(name: str, expected: Sequence[Any] | str, ranks: Sequence[Any] | str, limits: Mapping[str, float]) -> Row:
    """Return the row of ranks that are compared with expected ones, or of the error of one of them.

    Args:
        name: of the row.
        expected: what the ranks that are right computed.
        ranks: what the others computed.
        limits: by key of ``COMPARED``, the largest accepted difference.
    """
    for results in (expected, ranks):
        if isinstance(results, str):
            return Row(name, {"error": results[:400]}, NO_ERROR)
    return Row(name, differences(expected, ranks, limits), limits)  # type: ignore[arg-type]


def parity(session: Session) -> Iterator[Row]:
    """Compare every case of one process with the CPU: both get the same weights, batch and random numbers."""
    names = ["dense"] if session.tiny else ONE_PROCESS
    runs = [(name, dtype) for name in names for dtype in TOLERANCES]

    def jobs(layers: Sequence[str]) -> list[Job]:
        return [
            (computed, ONE_PROCESS[name], dtype, SIZES | {"transformer_impl": kind}, True)
            for name, dtype in runs
            for kind in layers
        ]

    on_cpu, on_gpu = without_gpus(results_of)(jobs(["local"])), on_ranks(jobs(LAYERS))
    for (name, dtype), expected in zip(runs, on_cpu, strict=True):
        for layers in LAYERS:
            precision = "tf32" if dtype == "float32" and layers != "local" else dtype
            yield compared(f"{name} {dtype} {layers}", expected, next(on_gpu), LIMITS[precision])


_OVERLAP, _DISTRIBUTED = "PP2 x DP2, distributed optimizer with overlap", "DP2, distributed optimizer"
IN_BFLOAT16 = ("TP2 with SP, packed", _OVERLAP, "CP2", "EP2, decisive routers")
"""Layouts that are compared in bfloat16 too, with Transformer Engine if it is installed."""


def layouts(session: Session) -> Iterator[Row]:
    """Compare layouts with one process of the same devices, and read the checkpoint of one layout in another."""
    jobs: dict[tuple[str, str], Job] = {}
    for dtype, names in {"float32": LAYOUTS, "bfloat16": IN_BFLOAT16}.items():
        sizes = SIZES | {"transformer_impl": LAYERS[-1] if dtype == "bfloat16" else "local"}
        for name in list(names)[: 1 if session.tiny else None]:
            case = LAYOUTS[name]
            jobs[case.model, dtype] = computed, Case(model=case.model), dtype, sizes
            jobs[name, dtype] = computed, case, dtype, sizes
    results: dict[tuple[str, str], list[Any] | str] = {}
    for (name, dtype), ranks in zip(jobs, on_ranks(list(jobs.values())), strict=True):
        results[name, dtype] = ranks
        if name in LAYOUTS:
            limits = dict.fromkeys(QUANTITIES, TOLERANCES[dtype])
            yield compared(f"{name} {dtype}", results[LAYOUTS[name].model, dtype], ranks, limits)
    for saved, loaded in ((_OVERLAP, _DISTRIBUTED), (_DISTRIBUTED, _OVERLAP)):
        path = str(session.folder / saved)
        expected, continued = results_of(
            [(at_checkpoint, LAYOUTS[name], "float32", SIZES, path, name == loaded) for name in (saved, loaded)]
        )
        limits = dict.fromkeys(("scores", "after"), TOLERANCES["float32"])
        yield compared(f"{saved}, read by {loaded}", expected, continued, limits)
