"""Print what verify reports of the faulty programs of the gallery.

python -m examples.verify.reports [NAME ...]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from parallel_state.verify import Verifier
from parallel_state.verify.program import load_program

LAYOUTS = {
    "label_smoothing": "tp=2",
    "gathered_logits": "tp=2",
    "padding_mask": "tp=2,dp=2,sp",
    "attention_sinks": "tp=2",
    "auxiliary_loss": "mbs=2",
    "sequence_loss": "tp=2,sp",
    "tokens_over_dp": "cp=2",
    "counted_on_each_rank": "cp=2",
    "tied_embeddings": "pp=2",
    "norm_weights": "tp=2,sp",
    "rope_positions": "cp=2",
    "expert_bias": "dp=2",
}

LEFT_OUT = ("gradient norm", "weight", "computed by the loss", "since the last gradient", "in it:", "  ")


def report(name: str) -> list[str]:
    """Return the lines of a report, but for the norm and weights, which differ in all, and most collectives."""
    program = load_program(f"{Path(__file__).parent / 'gallery.py'}:{name}").smaller(num_layers=2)
    outcome = Verifier(program, steps=1).verify(LAYOUTS[name])
    assert outcome.failure is None, outcome.failure
    lines = [re.sub(r"; \d+ in all: .*", "", line) for line in "\n".join(outcome.lines()).splitlines()]
    return [_cut(line) for line in lines if not line.startswith(LEFT_OUT)]


def _cut(line: str, longest: int = 260) -> str:
    return line if len(line) <= longest else f"{line[:longest]} ..."


if __name__ == "__main__":
    for name in sys.argv[1:] or LAYOUTS:
        print(f"{name}, {LAYOUTS[name]}", *report(name), sep="\n  ")
