"""Report of a run: curves as a picture, and the held-out accuracy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console

matplotlib.use("Agg")
from matplotlib import pyplot

__all__ = ["accuracy_before_and_after", "read_metrics", "write_report"]

Record = Mapping[str, float]


def write_report(directory: Path, console: Console) -> None:
    """Write ``curves.png`` into the run's directory, add the accuracy to ``summary.json``, and print it."""
    records = read_metrics(directory / "metrics.jsonl")
    draw_curves(records, directory / "curves.png")
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


def draw_curves(records: Sequence[Record], path: Path) -> None:
    """Draw reward, accuracy, KL to the reference policy and entropy over the steps of PPO."""
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
