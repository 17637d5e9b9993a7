"""Rows: what was checked, its figures, the limit, and the result. Each is a line of JSON as soon as it is known."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TextIO

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
Figure = float | int | str


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        name: what was checked.
        figures: what was measured, by name; the names end in units.
        limit: what the figures are compared with; empty if they are only reported.
        result: of the comparison: ``passed``, ``failed`` or ``skipped``.
        reason: why the row was skipped or failed, and what to do.
        part: the part that it belongs to.
        seconds: since the row before.
    """

    name: str
    figures: dict[str, Figure] = field(default_factory=dict)
    limit: str = ""
    result: str = PASSED
    reason: str = ""
    part: str = ""
    seconds: float = 0.0


def judged(name: str, passed: bool, limit: str, advice: str, **figures: Figure) -> Row:
    """Return a row that passed or failed; ``advice`` is its reason if it failed."""
    return Row(name, figures, limit, PASSED if passed else FAILED, "" if passed else advice)


def at_most(name: str, value: float, limit: float, advice: str, **figures: Figure) -> Row:
    """Return a row that passed if ``value`` is a number of at most ``limit``; NaN and infinity are not."""
    passed = math.isfinite(value) and value <= limit
    return judged(name, passed, f"at most {limit:g}", advice, value=value, **figures)


def skipped(name: str, reason: str) -> Row:
    """Return a row that was not checked."""
    return Row(name, result=SKIPPED, reason=reason)


class Report:
    """The rows of a run, written as they are added: a run that is killed keeps the rows written so far.

    Args:
        output: gets a line of JSON for each row, and is flushed.
    """

    def __init__(self, output: TextIO) -> None:
        self.rows: list[Row] = []
        self._output, self._last = output, time.monotonic()

    def add_all(self, part: str, name: str, rows: Iterable[Row]) -> None:
        """Add the rows of a check; an exception is a failed row, and the checks after it still run."""
        try:
            for row in rows:
                self._add(part, row)
        except Exception as error:  # what else is broken matters as much
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:400]
            self._add(part, Row(name, result=FAILED, reason=reason))

    def _add(self, part: str, row: Row) -> None:
        now = time.monotonic()
        self.rows.append(replace(row, part=part, seconds=round(now - self._last, 2)))
        self._last = now
        print(json.dumps(asdict(self.rows[-1])), file=self._output, flush=True)

    @property
    def status(self) -> int:
        """1 if a row failed or nothing was checked, otherwise 0."""
        results = {row.result for row in self.rows}
        return int(FAILED in results or PASSED not in results)

    def table(self) -> str:
        """Return the rows as a table, with the reason below a row, and the number of rows by result."""
        lines = []
        for row in self.rows:
            figures = [f"{name} {x:.3g}" if isinstance(x, float) else f"{name} {x}" for name, x in row.figures.items()]
            limit = f" ({row.limit})" if row.limit else ""
            lines.append(f"{row.part:2} {row.result:8} {row.name:40} {', '.join(figures)}".rstrip() + limit)
            lines += [f"   {row.reason}"] if row.reason else []
        counts = Counter(row.result for row in self.rows)
        numbers = ", ".join(f"{counts[result]} {result}" for result in (PASSED, FAILED, SKIPPED))
        return "\n".join([*lines, f"{len(self.rows)} rows: {numbers}"])
