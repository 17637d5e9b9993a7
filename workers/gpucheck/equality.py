"""Parts a and e: the cases of the parity tests on a GPU beside the CPU, and over NCCL beside one process."""

from __future__ import annotations

import functools
import itertools
import math
from contextlib import closing
from typing import Any

from workers.gpucheck.ranks import Ranks
from workers.gpucheck.rows import Run
from workers.gpucheck.scale import LAYERS, SIZES, TINY
from workers.parity.cases import LAYOUTS, ONE_PROCESS, ROWS, SMALL, Case
from workers.parity.computed import QUANTITIES, TOLERANCES, at_checkpoint, computed, differences

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


def parity(run: Run) -> None:
    """Compare every case of one process with the CPU: both get the same weights, batch and random numbers."""
    names = ["dense"] if run.actor is TINY else ONE_PROCESS
    with closing(Ranks()) as ranks, closing(Ranks(gpus=False)) as on_cpu:

        @functools.cache
        def expected(name: str, dtype: str) -> list[Any]:
            return on_cpu.run(computed, ONE_PROCESS[name], dtype, SIZES, True)

        for name, dtype, layers in itertools.product(names, TOLERANCES, LAYERS):
            limits = LIMITS["tf32" if dtype == "float32" and layers != "local" else dtype]
            with run.row(f"{name} {dtype} {layers}", limits) as figures:
                on_gpu = ranks.run(computed, ONE_PROCESS[name], dtype, SIZES | {"transformer_impl": layers}, True)
                figures |= differences(expected(name, dtype), on_gpu, limits)


_OVERLAP, _DISTRIBUTED = "PP2 x DP2, distributed optimizer with overlap", "DP2, distributed optimizer"
_WIDTH = math.sqrt(SIZES["hidden_size"] / SMALL["hidden_size"])
"""Logits and values are sums of ``hidden_size`` products with weights of one standard deviation. They grow with its
root, and so do their rounding errors, from the sizes for which ``TOLERANCES`` are."""
IN_BFLOAT16 = ("TP2 with SP, packed", _OVERLAP, "CP2", "EP2, decisive routers")
"""Layouts that are compared in bfloat16 too, with Transformer Engine if it is installed."""
CHECKPOINTS = (
    (_OVERLAP, _DISTRIBUTED, "float32"),
    (_DISTRIBUTED, _OVERLAP, "float32"),
    (_DISTRIBUTED, _DISTRIBUTED, "bfloat16"),
)
"""The layout that saves, the one that reads it and goes on, and the dtype."""


def _sizes(dtype: str) -> dict[str, Any]:
    return SIZES | {"transformer_impl": LAYERS[-1] if dtype == "bfloat16" else "local"}


def layouts(run: Run) -> None:
    """Compare layouts with one process of the same devices, and read the checkpoint of one layout in another."""
    with closing(Ranks()) as ranks:

        @functools.cache
        def one_process(model: str, dtype: str) -> list[Any]:
            return ranks.run(computed, Case(model=model), dtype, _sizes(dtype))

        for dtype, names in {"float32": LAYOUTS, "bfloat16": IN_BFLOAT16}.items():
            for name in list(names)[: 1 if run.actor is TINY else None]:
                limits = dict.fromkeys(QUANTITIES, TOLERANCES[dtype] * _WIDTH)
                with run.row(f"{name} {dtype}", limits) as figures:
                    expected = one_process(LAYOUTS[name].model, dtype)
                    figures |= differences(expected, ranks.run(computed, LAYOUTS[name], dtype, _sizes(dtype)))
        for saved, loaded, dtype in CHECKPOINTS:
            limits = dict.fromkeys(("scores", "after"), TOLERANCES[dtype])
            with run.row(f"{saved} {dtype}, read by {loaded}", limits) as figures:
                arguments = dtype, _sizes(dtype), str(run.folder / f"{saved} {dtype}")
                expected = ranks.run(at_checkpoint, LAYOUTS[saved], *arguments, False)
                figures |= differences(expected, ranks.run(at_checkpoint, LAYOUTS[loaded], *arguments, True), limits)
