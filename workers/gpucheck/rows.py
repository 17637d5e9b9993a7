"""Rows of the table: a value, the reference that it is compared with, a tolerance, and the result."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TextIO

__all__ = ["Result", "Row", "Table", "at_most", "compared", "raised", "status_of"]


class Result(StrEnum):
    """Result of a row."""

    OK = "ok"
    FAILED = "FAILED"
    INFO = "info"
    """A figure that is compared with nothing."""
    SKIPPED = "skipped"
    """Not measured; the note has the reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        name: the check, and what was checked.
        value: what was measured.
        reference: what it was compared with.
        tolerance: the largest accepted difference.
        result: of the comparison.
        note: the reason of a skipped row; what to do about a failed one.
    """

    name: str
    value: str
    reference: str = ""
    tolerance: str = ""
    result: Result = Result.INFO
    note: str = ""


def compared(name: str, passed: bool, value: str, reference: str, tolerance: str = "", *, note: str = "") -> Row:
    """Return a row that is ok if ``passed``; ``note`` is what to do otherwise."""
    return Row(name, value, reference, tolerance, Result.OK if passed else Result.FAILED, "" if passed else note)


def at_most(name: str, value: float, limit: float, *, reference: str = "", note: str = "") -> Row:
    """Return a row that is ok if ``value`` is a number of at most ``limit``; NaN and infinity are not."""
    return compared(name, math.isfinite(value) and value <= limit, f"{value:.3g}", reference, f"{limit:g}", note=note)


def raised(name: str, error: Exception) -> Row:
    """Return the failed row of a check that raised; the note has the first line of the error."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Row(name, "raised", result=Result.FAILED, note=text[:400])


def status_of(rows: Sequence[Row]) -> int:
    """Return 1 if a row failed or nothing was checked, otherwise 0."""
    checked = [row for row in rows if row.result in (Result.OK, Result.FAILED)]
    return int(not checked or any(row.result is Result.FAILED for row in checked))


class Table:
    """Rows that are printed as they are added.

    Args:
        output: the stream to print to.
    """

    WIDTHS = (57, 26, 22, 11)

    def __init__(self, output: TextIO) -> None:
        self.rows: list[Row] = []
        self._output = output
        self._print("row", "value", "reference", "tolerance", "result")

    def add(self, row: Row) -> None:
        """Add a row, and print it with its note."""
        self.rows.append(row)
        self._print(row.name, row.value, row.reference, row.tolerance, row.result)
        if row.note:
            self._output.write(f"    {row.note}\n")
        self._output.flush()

    def summary(self) -> str:
        """Return the number of rows by result, and the names of those that failed."""
        counts = Counter(row.result for row in self.rows)
        text = f"{len(self.rows)} rows: " + ", ".join(f"{counts[result]} {result}" for result in Result)
        failed = [f"  {row.name}" for row in self.rows if row.result is Result.FAILED]
        return "\n".join([text, *(["failed:", *failed] if failed else [])])

    def write_json(self, path: Path, seconds: float) -> None:
        """Write the rows, the exit status and the duration to a file."""
        content = {
            "status": status_of(self.rows),
            "seconds": round(seconds, 1),
            "rows": [asdict(row) for row in self.rows],
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _print(self, *cells: str) -> None:
        padded = [cell.ljust(width) for cell, width in zip(cells, (*self.WIDTHS, 0), strict=True)]
        self._output.write("  ".join(padded).rstrip() + "\n")
