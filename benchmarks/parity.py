"""Print the largest difference between each layout of the parity matrix and one process, as a table in Markdown.

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
`tests/workers/test_parity_matrix.py` asserts; megatron-core {megatron}, torch {torch}, {where}.

Every layout starts from the same weights and gets the same {rows} rows of different lengths as one process. The
tables show the largest absolute differences: over all response tokens for log-probabilities (actor) and values
(critic), over {steps} optimizer steps for both losses and both gradient norms (relative for norms above 1), and over
all weights of both models after these steps. bfloat16 is compared with one process in bfloat16.

Ratios and values are not clipped. With clipping, TP2 x DP2 in bfloat16 failed (gradient norm 3.03 against 3.22),
because rounding moves tokens across the boundary of the clip range. `tests/workers/test_parity.py` clips, in float32.
Weights are drawn with a standard deviation of 0.05. The row "one process, packed" shows how much bfloat16 differs if
one process arranges the same rows in another way.

Each token is routed to two of four experts. With randomly initialized routers, bfloat16 cannot be compared: some gaps
between router logits are 0, so any difference in rounding sends tokens to other experts. One process that packs its
rows differed from one that pads them (values by 0.17) as much as TP2 x PP2 x EP2 did (0.17) and EP2 (gradient norm by
2.1e-2). "Decisive routers" have the same sizes, and weights with which the token id determines the experts, by a
different table in each layer. The tests check that all gaps are above 2 and that the tokens of every rank go to all
four experts in every layer.

One process pads its rows and takes two at a time. "Packed" is one sequence without padding between rows. "By tokens"
are micro-batches of a limited number of tokens. "Router losses" are z loss with `aux_loss` and `seq_aux_loss`, or "by
row" with the latter alone; their values are included in the losses. z loss and `seq_aux_loss` are the same in every
layout and micro-batch. `aux_loss` balances the rows of one data-parallel rank's micro-batch, and `global_aux_loss`
those of all ranks' micro-batches so far in the step. If a layout or a token budget groups other rows together, these
two are different losses by definition; `tests/workers/train/test_router_losses.py` compares both on the same groups
of rows."""


def table(dtype: str, layouts: list[str]) -> tuple[str, bool]:
    """Return the table of these layouts, and whether all differences are within the tolerance."""
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
    parser.add_argument("--write", type=Path, help="file to write the page to")
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
