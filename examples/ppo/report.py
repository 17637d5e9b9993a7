"""Report of a run: curves as a picture, accuracy, and a table of the time of each stage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot

__all__ = ["accuracy_before_and_after", "read_metrics", "write_report"]

Record = Mapping[str, float]


def write_report(directory: Path, stages: Mapping[str, float], wall: float, console: Console) -> None:
    """Write ``curves.png`` and ``summary.json`` into the run's directory, and print a summary."""
    records = read_metrics(directory / "metrics.jsonl")
    draw_curves(records, directory / "curves.png")
    before, after = accuracy_before_and_after(records)
    summary = {"accuracy_before": before, "accuracy_after": after, "wall_s": wall, "stages_s": dict(stages)}
    (directory / "summary.json").write_text(json.dumps(summary, indent=1))
    console.print(stage_table(stages, wall))
    console.print(
        f"held-out accuracy, greedy: [bold]{before:.3f}[/bold] before PPO, [bold]{after:.3f}[/bold] after it "
        f"({after - before:+.3f}) in {wall:.0f} s",
        highlight=False,
    )
    console.print(f"run directory: {directory}", highlight=False, soft_wrap=True)


def read_metrics(path: Path) -> list[Record]:
    """Return the lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def accuracy_before_and_after(records: Sequence[Record]) -> tuple[float, float]:
    """Return the held-out accuracy of the first and of the last record that has one."""
    measured = [record["held_out/accuracy"] for record in records if "held_out/accuracy" in record]
    return measured[0], measured[-1]


def stage_table(stages: Mapping[str, float], wall: float) -> Table:
    """Return a table of the seconds and share of every stage, the longest first; the rest is "other"."""
    table = Table("stage", "seconds", "share", title="Time by stage", title_justify="left")
    rows = sorted(stages.items(), key=lambda row: -row[1])
    for name, seconds in [*rows, ("other", wall - sum(stages.values()))]:
        table.add_row(name, f"{seconds:.1f}", f"{seconds / wall:.0%}")
    return table


def draw_curves(records: Sequence[Record], path: Path) -> None:
    """Draw reward, accuracy, KL to the reference and entropy over the steps of PPO."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    _curve(left, records, "train/score", "reward, sampled", "tab:blue")
    _curve(left, records, "train/accuracy", "accuracy on training problems, sampled", "tab:green", linestyle="--")
    _curve(left, records, "held_out/accuracy", "accuracy on held-out problems, greedy", "tab:red", marker="o")
    left.set(xlabel="step of PPO", ylim=(0, 1))
    left.legend()
    _curve(right, records, "actor/reward_kl_penalty", "KL to the reference, per token", "tab:purple")
    _curve(right, records, "actor/entropy", "entropy, per token", "tab:orange")
    right.set(xlabel="step of PPO")
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curve(axes: Any, records: Sequence[Record], name: str, label: str, color: str, **style: Any) -> None:
    """Draw one metric. Of a step that a resumed run repeated, the last value is shown."""
    points = dict(sorted({record["step"]: record[name] for record in records if name in record}.items()))
    axes.plot(list(points), list(points.values()), color=color, label=label, **style)
