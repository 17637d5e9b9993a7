"""What verifying one layout found: differences, where they begin, and the error that a test raises for them."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from parallel_state.errors import MControllerError
from parallel_state.hangs.report import rank_text


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that differs from that of one process, or from that of another replica.

    Attributes:
        kind: ``"loss"``, ``"gradient"``, ``"gradient norm"``, ``"weight"``, ``"buffer"``, ``"replicas"``, ``"mark"`` or
            ``"seed"``.
        name: the parameter, buffer or reported value.
        step: the training step, from 1.
        rank: the rank.
        coordinates: its index on every axis of more than one rank.
        error: the largest difference, relative to the largest value; NaN or infinite values count as infinite.
        note: what the value is instead, if that is simple: a multiple, or a part of a sum.
    """

    kind: str
    name: str
    step: int
    rank: int
    coordinates: dict[str, int]
    error: float
    note: str = ""

    def __str__(self) -> str:
        where = rank_text(self.rank, self.coordinates)
        if not math.isfinite(self.error):
            return f"{self.kind} {self.name}, step {self.step}, {where}: {self.note or 'not finite'}"
        note = f"; {self.note}" if self.note else ""
        return f"{self.kind} {self.name}, step {self.step}, {where}: off by {self.error:.2g}{note}"


@dataclass(frozen=True, slots=True)
class DifferingModule:
    """The first module whose output, or the gradient of whose output, differs.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        module: the name of the module in the model; layers are counted over the whole model.
        source: class, file and line of its ``forward``.
        micro_batch: the global index of the micro-batch in the step.
        step: the training step, from 1.
        rank: the rank.
        coordinates: its index on every axis of more than one rank.
        error: the largest difference, relative to the largest value.
        note: what the value is instead, if that is simple.
        collectives: what the rank communicated in the module; backward, since the last gradient that is right.
        computed_by: backward, the modules in whose backward pass the gradient is computed, and their operations; empty
            if that is the loss or another stage.
    """

    direction: str
    module: str
    source: str
    micro_batch: int
    step: int
    rank: int
    coordinates: dict[str, int]
    error: float
    note: str = ""
    collectives: tuple[str, ...] = ()
    computed_by: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = "output of" if self.direction == "forward" else "gradient of the output of"
        where = rank_text(self.rank, self.coordinates)
        note = f"; {self.note}" if self.note else ""
        return (
            f"first in the {self.direction} pass: {what} {self.module} ({self.source}), "
            f"micro-batch {self.micro_batch}, step {self.step}, {where}: off by {self.error:.2g}{note}"
        )


@dataclass
class Outcome:
    """The result of verifying one layout.

    Attributes:
        layout: its text.
        ranks: the number of ranks.
        differences: all differences of the first step that has one.
        place: where they begin, before an error too; None if they are equal, or if no activation differs.
        failure: the error that ended the training in this layout; None if it ended as it should.
        largest: the largest relative difference of all compared values, within the tolerance or not.
        seconds: the time that it took.
        bits: a sum over the bits that all ranks have after the last step.
        finalized_by: if no activation differs, what the rank communicated between the backward pass and the update.
    """

    layout: str
    ranks: int
    differences: list[Difference] = field(default_factory=list)
    place: DifferingModule | None = None
    failure: str | None = None
    largest: float = 0.0
    seconds: float = 0.0
    bits: str = ""
    finalized_by: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether the layout trains the model of one process."""
        return not self.differences and self.failure is None

    def cause(self) -> tuple[str, ...]:
        """Return what layouts that differ for the same reason have in common."""
        if self.failure is not None:
            return ("failure", re.sub(r"\d+", "", self.first()))
        if self.place is not None:
            return (self.place.direction, re.sub(r"\d+", "", self.place.module))
        first = self._first_difference()
        return () if first is None else (first.kind, re.sub(r"\d+", "", first.name))

    def _first_difference(self) -> Difference | None:
        """Return the first difference that has a note; the norm follows from gradients."""
        ordered = sorted(
            self.differences, key=lambda difference: (not difference.note, difference.kind == "gradient norm")
        )
        return next(iter(ordered), None)

    def first(self) -> str:
        """Return one line: the place where differences begin, the failure, or the first difference."""
        if self.failure is not None:
            return self.failure.partition("\n")[0]
        if self.place is not None:
            return str(self.place)
        return str(self._first_difference() or "")

    def lines(self) -> list[str]:
        """Return the error or the differences, one line for each kind, and the place."""
        lines = [] if self.failure is None else self.failure.splitlines()
        for kind in dict.fromkeys(difference.kind for difference in self.differences):
            of_kind = [difference for difference in self.differences if difference.kind == kind]
            names = list(dict.fromkeys(difference.name for difference in of_kind))
            worst = max(of_kind, key=lambda difference: difference.error)
            more = f"; {len(names)} in all: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
            lines.append(f"{worst}{more if len(names) > 1 else ''}")
        if self.place is None:
            ran = "\n  ".join(self.finalized_by)
            return [*lines, f"after the backward pass: {ran}"] if ran else lines
        ran = "\n  ".join(self.place.collectives) or "no collective"
        if self.place.direction == "forward":
            return [*lines, str(self.place), f"in it: {ran}"]
        by = "\n  ".join(_shortened(self.place.computed_by)) or "the loss or another stage"
        return [*lines, str(self.place), f"computed by {by}", f"since the last gradient that is right: {ran}"]

    def report(self) -> str:
        """Return the differences, as an error or a failing test shows them."""
        lines = "\n  ".join(self.lines())
        return f"{self.layout} does not train the model that one process trains:\n  {lines}"

    def as_json(self) -> dict[str, Any]:
        """Return the outcome in types of JSON."""
        return {**asdict(self), "equal": self.equal}


class LayoutDiffers(MControllerError, AssertionError):
    """A layout does not train the model that one process trains; field: ``outcome``."""

    outcome: Outcome


def _shortened(computed_by: tuple[str, ...], most: int = 3) -> list[str]:
    """Return one line for each kind of module, such as one for all experts of a layer, with its first operations."""
    kinds: dict[str, list[str]] = {}
    for line in computed_by:
        kinds.setdefault(re.sub(r"\d+", "", line.partition(" (")[0]), []).append(line)
    lines = []
    for alike in kinds.values():
        module, _, operations = alike[0].partition("): ")
        first = operations.split(", ")
        of_all = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        lines.append(f"{module}){of_all}: {', '.join(first[:most])}{', ...' if len(first) > most else ''}")
    if any("MoEAuxLossAutoScaler" in line for line in computed_by):
        lines.append("an auxiliary loss is among them; where Megatron scales it wrongly: docs/verify.md#gallery")
    return lines
