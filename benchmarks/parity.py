"""The largest difference between every layout of the parity matrix and one process, as a table in Markdown.

python benchmarks/parity.py [--write docs/parity.md]
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import workers
from tests.workers.parity import IN_BFLOAT16, LAYOUTS, QUANTITIES, ROWS, STEPS, TOLERANCES, differences

HEAD = """# Parity of the layouts with one process

Written by `python benchmarks/parity.py --write docs/parity.md`, which measures what
`tests/workers/test_parity_matrix*.py` assert; megatron-core {megatron}, torch {torch}, {where}.

Every layout starts from the same weights and is given the same {rows} rows of different lengths as one process. Shown
are the largest absolute differences: over all response tokens for log-probabilities (actor) and values (critic), over
{steps} optimizer steps for both losses and both gradient norms (norms above 1 relative to themselves), and over all
weights of both after these steps. bfloat16 is compared with one process in bfloat16.
The clipping of ratios and values is off: with it on, TP2 x DP2 in bfloat16 missed (gradient norm 3.03 against 3.22),
since rounding moves tokens across the edge of a clip. `tests/workers/test_parity.py` keeps it on, in float32.
Weights are drawn with a standard deviation of 0.05. In bfloat16 the floor is what one process makes of the same rows in
another arrangement: see "one process, packed".
Two experts are chosen of four. With routers of random weights this is no comparison in bfloat16: gaps between logits
are down to 0, so that any other rounding sends tokens to other experts, and one process that packs its rows missed
one that pads them (values off by 0.17) just as TP2 x PP2 x EP2 did (0.17) and EP2 (gradient norm by 2.1e-2). "Decisive
routers" have the same sizes and weights that let a token's id decide, by another table in every layer: the tests see
to it that all gaps are above 2 and that every rank's tokens go to all four experts in every layer.

One process pads its rows and takes them two at a time; "packed" is one sequence without padding between rows, and "by
tokens" are micro-batches of at most so many tokens. "Router losses" are z loss with `aux_loss` and `seq_aux_loss`, or
"by row" with the latter alone; their values count among the losses. z loss and `seq_aux_loss` are the same in every
layout and micro-batch. `aux_loss` balances the rows of one data-parallel rank's micro-batch, and `global_aux_loss`
those of all ranks' micro-batches so far in the step: where another layout or budget puts other rows together, they are
other losses by definition (`tests/workers/test_router_losses.py` compares both where the rows are the same)."""


def table(dtype: str, layouts: list[str]) -> tuple[str, bool]:
    """The figures of these layouts, and whether all are within the tolerance."""
    lines = [f"## {dtype}: within {TOLERANCES[dtype]:g}", "", "| layout | ranks | " + " | ".join(QUANTITIES) + " |"]
    lines.append("|---|---:|" + "---:|" * len(QUANTITIES))
    holds = True
    for layout in layouts:
        found = differences(layout, dtype)
        holds &= all(value <= TOLERANCES[dtype] for value in found.values())
        figures = " | ".join(f"{found[quantity]:.1e}" for quantity in QUANTITIES)
        lines.append(f"| {layout} | {LAYOUTS[layout].ranks} | {figures} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines), holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a file to write the table to")
    arguments = parser.parse_args()
    parts = [table("float32", list(LAYOUTS)), table("bfloat16", list(IN_BFLOAT16))]
    head = HEAD.format(
        megatron=version("megatron-core"),
        torch=version("torch").split("+")[0],
        where="gloo on CPU" if workers.cpu.install() else "NCCL on GPUs",
        rows=ROWS,
        steps=STEPS,
    )
    document = "\n\n".join([head, *(text for text, _ in parts)]) + "\n"
    print(document)
    if arguments.write is not None:
        arguments.write.write_text(document)
    return 0 if all(holds for _, holds in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
