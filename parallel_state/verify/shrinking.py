"""The smallest program that still differs: fewer axes, layers and micro-batches, shorter rows, and one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from parallel_state.verify.layouts import ONE_PROCESS, parallel_arguments
from parallel_state.verify.outcome import Outcome
from parallel_state.verify.program import Program
from parallel_state.verify.verifier import Verifier

_LEAST_LENGTH = 4  # shorter rows may have no token that counts


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """A program that differs.

    Attributes:
        layout: the text of the layout.
        changes: arguments of ``Program.smaller``.
        steps: training steps.
        outcome: what verifying it found.
    """

    layout: str
    changes: dict[str, int]
    steps: int
    outcome: Outcome

    def __str__(self) -> str:
        changes = "".join(f", {name}={value}" for name, value in self.changes.items())
        return f"layout {self.layout}{changes}, steps={self.steps}"


def shrink(program: Program, layout: str, steps: int) -> Shrunk | None:
    """Return the smallest program that differs in the same way; None if the given one does not differ.

    Axes and flags are left out while a difference remains, then steps, micro-batches, layers, and tokens of rows that
    cp does not divide.

    Args:
        program: the program.
        layout: the text of a layout in which it differs.
        steps: training steps.
    """
    smallest = _differing(program, Shrunk(layout, {}, steps, Outcome(layout, 0)))
    smaller = smallest
    while smaller is not None:
        smallest = smaller
        candidates = (_differing(program, smaller) for smaller in _smaller(program, smallest))
        smaller = next((candidate for candidate in candidates if candidate is not None), None)
    return smallest


def source_of_test(imports: str, expression: str, shrunk: Shrunk) -> str:
    """Return the source of a test that fails as long as the program differs.

    Args:
        imports: the statements that import what the expression needs.
        expression: its value is the program.
        shrunk: the smallest program.
    """
    name = "".join(character if character.isalnum() else "_" for character in shrunk.layout)
    arguments = ", ".join(f"{key}={value}" for key, value in shrunk.changes.items())
    program = f"program.smaller({arguments})" if arguments else "program"
    return (
        f"from parallel_state.verify import verify_layout\n{imports}\n\nprogram = {expression}\n\n\n"
        f"def test_{name}_trains_the_model_of_one_process():\n"
        f"    verify_layout({program}, {shrunk.layout!r}, steps={shrunk.steps})\n"
    )


def _differing(program: Program, trial: Shrunk) -> Shrunk | None:
    try:
        verifier = Verifier(program.smaller(**trial.changes), steps=trial.steps)
        verifier.locates = False
        outcome = verifier.verify(trial.layout)
    except Exception:  # whatever a program raises that cannot be this small
        return None
    expected = trial.outcome.failure
    if outcome.equal or (trial.outcome.ranks and _kind(outcome.failure) != _kind(expected)):
        return None
    return dataclasses.replace(trial, outcome=outcome)


def _kind(failure: str | None) -> str | None:
    return None if failure is None else failure.partition(":")[0]


def _smaller(program: Program, shrunk: Shrunk) -> Iterator[Shrunk]:
    parts = shrunk.layout.split(",")
    for index in range(len(parts)):
        layout = ",".join(parts[:index] + parts[index + 1 :])
        if layout:
            yield dataclasses.replace(shrunk, layout=layout)
    if shrunk.steps > 1:
        yield dataclasses.replace(shrunk, steps=1)
    now = {"micro_batches": program.micro_batches, "num_layers": _layers(program)}
    now |= {} if "cp=" in shrunk.layout else {"seq_length": program.seq_length}
    for name, value in (now | shrunk.changes).items():
        least = _LEAST_LENGTH if name == "seq_length" else 1
        for less in (number for number in range(least, value) if value % number == 0):
            yield dataclasses.replace(shrunk, changes={**shrunk.changes, name: less})


def _layers(program: Program) -> int:
    config: Any = program.config(**parallel_arguments(ONE_PROCESS, None))
    return int(config.num_layers)
