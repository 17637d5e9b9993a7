"""Findings: a verdict on one fact of one node, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Verdict of a check."""

    OK = "ok"
    WARNING = "warning"
    """A run may be slow, or fail later."""
    FAILURE = "FAILURE"
    """A run fails, or hangs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict of one check.

    Attributes:
        check: name of the check.
        node: address of the node, or ``"all"``.
        verdict: of the check.
        found: what was found.
        advice: what to do about it; empty if the verdict is ok.
    """

    check: str
    node: str
    verdict: Verdict
    found: str
    advice: str = ""


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if a check failed, otherwise 0: warnings do not stop a run."""
    return int(any(finding.verdict is Verdict.FAILURE for finding in findings))


def table(findings: Sequence[Finding]) -> str:
    """Return the findings as a table, each with its advice in the next line, and the number of each verdict."""
    cells = [("check", "node", "verdict", "found")]
    cells += [(each.check, each.node, each.verdict.value, each.found) for each in findings]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    advised = [
        line + (f"\n    -> {finding.advice}" if finding.advice else "")
        for line, finding in zip(lines[1:], findings, strict=True)
    ]
    counts = Counter(finding.verdict for finding in findings)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
    return "\n".join([lines[0], *advised, f"{len(findings)} checks: {summary}"])
