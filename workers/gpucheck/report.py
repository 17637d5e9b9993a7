"""Rows: figures beside their limits. Each is a line of JSON as soon as it is known."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
Figure = float | int | str


class Report:
    """The rows of a run, written as they are known: a run that is killed keeps them.

    Args:
        output: gets a line of JSON for each row, and is flushed.

    Attributes:
        part: the part of the next rows.
        names: the rows so far, by result.
    """

    def __init__(self, output: TextIO) -> None:
        self.part = ""
        self.names: dict[str, list[str]] = {PASSED: [], FAILED: [], SKIPPED: []}
        self._output = output

    @contextlib.contextmanager
    def row(self, name: str, limits: Mapping[str, float] | None = None) -> Iterator[dict[str, Figure]]:
        """Write the row of the figures that the block sets, whose names end in units; it goes on after an exception.

        Args:
            name: of the row.
            limits: the largest number that a figure may have. The row fails if one is larger, NaN or missing, or if the
                block raises, which is the figure ``error``.
        """
        figures: dict[str, Figure] = {}
        limits, started = limits or {}, time.monotonic()
        try:
            yield figures
        except Exception as error:  # what else is broken matters as much
            figures["error"] = f"{type(error).__name__}: {error}".partition("\n")[0][:400]
        is_within = all(float(figures.get(figure, "nan")) <= limit for figure, limit in limits.items())
        result = PASSED if is_within and "error" not in figures else FAILED
        self._write(result, name, figures=figures, limits=limits, seconds=round(time.monotonic() - started, 2))

    def skip(self, name: str, reason: str) -> None:
        """Write a row that is not checked."""
        self._write(SKIPPED, name, reason=reason)

    def _write(self, result: str, name: str, **values: Any) -> None:
        row = {"result": result, "part": self.part, "name": name, **values}
        print(json.dumps(row), file=self._output, flush=True)
        self.names[result].append(name)

    @property
    def status(self) -> int:
        """1 if a row failed or nothing was checked, otherwise 0."""
        return int(bool(self.names[FAILED]) or not self.names[PASSED])

    def summary(self) -> str:
        """Return the number of rows by result, and which failed."""
        counts = ", ".join(f"{len(names)} {result}" for result, names in self.names.items())
        failed = "".join(f"\nfailed: {name}" for name in self.names[FAILED])
        return f"{counts}; docs/gpu.md: what to do if a row fails{failed}"
