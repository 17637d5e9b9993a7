"""Programs that the tests of ``verify`` change: the examples, with a part replaced."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from parallel_state.verify import Program
from parallel_state.verify.program import load_program

EXAMPLES = Path(__file__).parents[3] / "examples" / "verify"

GPT = load_program(f"{EXAMPLES / 'gpt.py'}:program")
MOE = load_program(f"{EXAMPLES / 'moe.py'}:program")
PACKED = load_program(f"{EXAMPLES / 'packed.py'}:program")
PADDED = load_program(f"{EXAMPLES / 'packed.py'}:padded")


def smaller(program: Program, **changes: Any) -> Program:
    """Return a program of two layers and two micro-batches, with other fields of the program or of its config."""
    fields = {field.name for field in dataclasses.fields(Program)}
    changed = dataclasses.replace(program, **{name: value for name, value in changes.items() if name in fields})
    of_config = {"num_layers": 2, **{name: value for name, value in changes.items() if name not in fields}}
    return changed.smaller(micro_batches=changes.get("micro_batches", 2), **of_config)
