"""Print the largest difference between every layout of the parity matrix and one process, as Markdown tables.

    python benchmarks/parity.py

docs/results.md has the largest difference of each layout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import workers
from parallel_state import simulated
from tests import forking
from tests.workers.parity import IN_BFLOAT16, LAYOUTS, OF_MANY_RANKS, QUANTITIES, TOLERANCES, differences
from workers.parity.cases import ROWS, STEPS

HEAD = """# Parity of the layouts with one process

`tests/workers/test_parity_matrix.py` asserts it; megatron-core {megatron}, torch {torch}, {backend}.

Every layout starts from the weights of one process, and computes on the same {rows} rows of different lengths. The
tables show the largest absolute differences: of log-probabilities (actor) and values (critic) of all response tokens,
of both losses and both gradient norms (divided by their size if it is above 1) over {steps} optimizer steps, and of all
weights of both models after them. bfloat16 is compared with one process in bfloat16. Ratios and values are not
clipped, since rounding moves tokens across the edge of a clip.

With "decisive routers" the id of a token determines its experts: with random ones, rounding in bfloat16 sends tokens to
other experts. "Packed" rows form one sequence; otherwise two padded rows are computed at a time, or as many as fit into
a limit of tokens ("by tokens"). "Router losses" are z loss with `aux_loss` and `seq_aux_loss`, or, "by row", with
`seq_aux_loss` alone; `aux_loss` and `global_aux_loss` depend on how rows are grouped.
"""


OF_MANY_RANKS_TEXT = """
On simulated ranks in one process."""


def table(dtype: str, layouts: list[str], run: Callable[..., Any] = forking.run_ranks) -> tuple[str, bool]:
    """Return the table of these layouts, and whether all differences are within the tolerance."""
    title = f"## {dtype}: within {TOLERANCES[dtype]:g}"
    if run is not forking.run_ranks:
        title = f"## Many ranks, {dtype}: within {TOLERANCES[dtype]:g}\n{OF_MANY_RANKS_TEXT}"
    lines = [title, "", "| layout | " + " | ".join(QUANTITIES) + " |"]
    lines.append("|---|" + "---:|" * len(QUANTITIES))
    passed = True
    for layout in layouts:
        errors = differences(layout, dtype, run)
        passed &= all(value <= TOLERANCES[dtype] for value in errors.values())
        figures = " | ".join(f"{errors[quantity]:.1e}" for quantity in QUANTITIES)
        lines.append(f"| {layout} | {figures} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines), passed


def simulated_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    return simulated.run_ranks(world_size, function, *arguments)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    parts = [
        table("float32", list(LAYOUTS)),
        table("bfloat16", list(IN_BFLOAT16)),
        table("float32", list(OF_MANY_RANKS), simulated_ranks),
        table("bfloat16", list(OF_MANY_RANKS)[:1], simulated_ranks),
    ]
    head = HEAD.format(
        megatron=version("megatron-core"),
        torch=version("torch").split("+")[0],
        backend="gloo on CPU" if workers.cpu.install() else "NCCL on GPUs",
        rows=ROWS,
        steps=STEPS,
    )
    print("\n\n".join([head, *(text for text, _ in parts)]))
    return 0 if all(passed for _, passed in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
