"""Rows: what was checked, its figures, the limit, and the result. Each is a line of JSON as soon as it is known."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TextIO

Figure = float | int | str


class Result(StrEnum):
    """Result of a row."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        name: what was checked.
        figures: what was measured, by name; the names end in units.
        limit: what the figures are compared with; empty if they are only reported.
        result: of the comparison.
        reason: why the row was skipped or failed, and what to do.
        part: the part that it belongs to.
        seconds: since the row before.
    """

    name: str
    figures: dict[str, Figure] = field(default_factory=dict)
    limit: str = ""
    result: Result = Result.PASSED
    reason: str = ""
    part: str = ""
    seconds: float = 0.0


def judged(name: str, passed: bool, limit: str, advice: str, **figures: Figure) -> Row:
    """Return a row that passed or failed; ``advice`` is its reason if it failed."""
    return Row(name, figures, limit, Result.PASSED if passed else Result.FAILED, "" if passed else advice)


def at_most(name: str, value: float, limit: float, advice: str, **figures: Figure) -> Row:
    """Return a row that passed if ``value`` is a number of at most ``limit``; NaN and infinity are not."""
    passed = math.isfinite(value) and value <= limit
    return judged(name, passed, f"at most {limit:g}", advice, value=value, **figures)


def measured(name: str, **figures: Figure) -> Row:
    """Return a row of figures that are compared with nothing."""
    return Row(name, figures)


def skipped(name: str, reason: str) -> Row:
    """Return a row that was not checked."""
    return Row(name, result=Result.SKIPPED, reason=reason)


def raised(name: str, error: Exception) -> Row:
    """Return the failed row of a check that raised, with the first line of the error."""
    return Row(name, result=Result.FAILED, reason=f"{type(error).__name__}: {error}".partition("\n")[0][:400])


class Report:
    """The rows of a run, written as they are added: a run that is killed keeps the rows written so far.

    Args:
        output: gets a line of JSON for each row, and is flushed.
    """

    def __init__(self, output: TextIO) -> None:
        self.rows: list[Row] = []
        self._output = output
        self._last = time.monotonic()

    def add_all(self, part: str, name: str, rows: Iterable[Row]) -> None:
        """Add the rows of a check; an exception is a failed row, and the checks after it still run."""
        try:
            for row in rows:
                self._add(part, row)
        except Exception as error:  # what else is broken matters as much
            self._add(part, raised(name, error))

    def _add(self, part: str, row: Row) -> None:
        now = time.monotonic()
        row = replace(row, part=part, seconds=round(now - self._last, 2))
        self._last = now
        self.rows.append(row)
        self._output.write(json.dumps(asdict(row)) + "\n")
        self._output.flush()

    @property
    def status(self) -> int:
        """1 if a row failed or nothing was checked, otherwise 0."""
        results = {row.result for row in self.rows}
        return int(Result.FAILED in results or Result.PASSED not in results)

    def table(self) -> str:
        """Return the rows as a table, with the reason below a row, and the number of rows by result."""
        lines = []
        for row in self.rows:
            figures = ", ".join(f"{name} {_short(value)}" for name, value in row.figures.items())
            cells = (row.part.ljust(2), row.result.ljust(8), row.name.ljust(40), figures)
            lines.append(" ".join(cells).rstrip() + (f" ({row.limit})" if row.limit else ""))
            lines += [f"   {row.reason}"] if row.reason else []
        counts = Counter(row.result for row in self.rows)
        return "\n".join(
            [*lines, f"{len(self.rows)} rows: {', '.join(f'{counts[result]} {result}' for result in Result)}"]
        )


def _short(value: Figure) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
