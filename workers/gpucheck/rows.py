"""Rows: what was checked, its figures and their limits. Each is a line of JSON as soon as it is known."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
Figure = float | int | str
NO_ERROR = {"error": "none"}
"""Limits of a row whose figure ``error`` says what was raised."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        name: what was checked.
        figures: what was measured, by name; the names end in units.
        limits: by figure, the largest number that it may have, or the text that it must have.
        is_skipped: whether it was not checked; a figure says why.
    """

    name: str
    figures: Mapping[str, Figure]
    limits: Mapping[str, Figure] = field(default_factory=dict)
    is_skipped: bool = False

    @property
    def result(self) -> str:
        """``passed``, ``failed`` or ``skipped``. NaN and infinity are above every limit."""
        if self.is_skipped:
            return SKIPPED
        return PASSED if all(_within(self.figures[name], limit) for name, limit in self.limits.items()) else FAILED

    def line(self) -> str:
        """Return the name and the figures with their limits."""
        texts = [
            f"{name} {_text(figure)}" + (f" (limit {_text(self.limits[name])})" if name in self.limits else "")
            for name, figure in self.figures.items()
        ]
        return f"{self.name:40} {', '.join(texts)}"


def _within(figure: Figure, limit: Figure) -> bool:
    return figure == limit if isinstance(figure, str) or isinstance(limit, str) else figure <= limit


def _text(figure: Figure) -> str:
    return f"{figure:.3g}" if isinstance(figure, float) else str(figure)


class Report:
    """The rows of a run, written as they are added: a run that is killed keeps the rows written so far.

    Args:
        output: gets a line of JSON for each row, and is flushed.
    """

    def __init__(self, output: TextIO) -> None:
        self.rows: list[tuple[str, Row]] = []
        self._output, self._last = output, time.monotonic()

    def add_all(self, part: str, name: str, rows: Iterable[Row]) -> None:
        """Add the rows of a check; an exception is a failed row, and the checks after it still run."""
        try:
            for row in rows:
                self._add(part, row)
        except Exception as error:  # what else is broken matters as much
            text = f"{type(error).__name__}: {error}".partition("\n")[0][:400]
            self._add(part, Row(name, {"error": text}, NO_ERROR))

    def _add(self, part: str, row: Row) -> None:
        now = time.monotonic()
        values = {"part": part, "name": row.name, "result": row.result, "figures": row.figures, "limits": row.limits}
        print(json.dumps(values | {"seconds": round(now - self._last, 2)}), file=self._output, flush=True)
        self.rows.append((part, row))
        self._last = now

    @property
    def status(self) -> int:
        """1 if a row failed or nothing was checked, otherwise 0."""
        results = {row.result for _, row in self.rows}
        return int(FAILED in results or PASSED not in results)

    def table(self) -> str:
        """Return the rows as a table, and the number of rows by result."""
        lines = [f"{part} {row.result:8} {row.line()}" for part, row in self.rows]
        counts = Counter(row.result for _, row in self.rows)
        numbers = ", ".join(f"{counts[result]} {result}" for result in (PASSED, FAILED, SKIPPED))
        return "\n".join([*lines, f"{len(self.rows)} rows: {numbers}; docs/gpu.md: what to do if a row fails"])
