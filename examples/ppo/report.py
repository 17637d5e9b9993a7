"""Report of a run: the held-out accuracy before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

__all__ = ["accuracy_before_and_after", "read_metrics", "write_report"]

Record = Mapping[str, float]


def write_report(directory: Path, console: Console) -> None:
    """Add the accuracy to ``summary.json``, and print it."""
    records = read_metrics(directory / "metrics.jsonl")
    before, after = accuracy_before_and_after(records)
    path = directory / "summary.json"
    summary = {"accuracy_before": before, "accuracy_after": after, **json.loads(path.read_text())}
    path.write_text(json.dumps(summary, indent=1))
    console.print(
        f"held-out accuracy, greedy: [bold]{before:.3f}[/bold] before PPO, [bold]{after:.3f}[/bold] after it "
        f"({after - before:+.3f}) in {summary['wall_s']:.0f} s",
        highlight=False,
    )


def read_metrics(path: Path) -> list[Record]:
    """Return the lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def accuracy_before_and_after(records: Sequence[Record]) -> tuple[float, float]:
    """Return the held-out accuracy of the first and of the last record that has one."""
    measured = [record["held_out/accuracy"] for record in records if "held_out/accuracy" in record]
    return measured[0], measured[-1]
