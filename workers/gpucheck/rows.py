"""A run and its rows: figures beside their limits. Each is a line of JSON as soon as it is known."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from workers.config import ActorConfig

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
Figure = float | int | str


@dataclass
class Run:
    """A run of the checks, whose rows are written as they are known: one that is killed keeps them.

    Attributes:
        output: gets a line of JSON for each row, and is flushed.
        actor: of parts b to d.
        folder: for checkpoints.
        vllm_python: the interpreter of engines.
        part: the part of the next rows.
        results: the result and the name of each row so far.
        scores: of the actor in part c, by precision.
    """

    output: TextIO
    actor: ActorConfig
    folder: Path
    vllm_python: str
    part: str = ""
    results: list[tuple[str, str]] = field(default_factory=list)
    scores: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @contextlib.contextmanager
    def row(self, name: str, limits: Mapping[str, float] | None = None) -> Iterator[dict[str, Figure]]:
        """Write the row of the figures that the block sets, whose names end in units; it goes on after an exception.

        Args:
            name: of the row.
            limits: the largest number that a figure may have. The row fails if one is larger, NaN or missing, or if the
                block raises, which is the figure ``error``.
        """
        figures: dict[str, Figure] = {}
        limits, started, result = limits or {}, time.monotonic(), FAILED
        try:
            yield figures
            if all(float(figures.get(figure, "nan")) <= limit for figure, limit in limits.items()):
                result = PASSED
        except Exception as error:  # what else is broken matters as much
            figures["error"] = f"{type(error).__name__}: {error}".partition("\n")[0][:400]
        finally:  # also if the run is stopped
            self.write(result, name, figures=figures, limits=limits, seconds=round(time.monotonic() - started, 2))

    def write(self, result: str, name: str, **values: Any) -> None:
        """Write a row that is known."""
        row = {"result": result, "part": self.part, "name": name, **values}
        print(json.dumps(row), file=self.output, flush=True)
        self.results.append((result, name))

    @property
    def status(self) -> int:
        """1 if a row failed or nothing was checked, otherwise 0."""
        return int({result for result, _ in self.results} - {SKIPPED} != {PASSED})

    def summary(self) -> str:
        """Return the number of rows by result, and which failed."""
        counts = Counter(result for result, _ in self.results)
        failed = [f"\nfailed: {name}" for result, name in self.results if result == FAILED]
        numbers = ", ".join(f"{counts[result]} {result}" for result in (PASSED, FAILED, SKIPPED))
        return f"{numbers}; docs/gpu.md: what to do if a row fails{''.join(failed)}"
