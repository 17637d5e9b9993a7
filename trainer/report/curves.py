"""The curves of a run as a picture, from its ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.report.reading import records_of
from trainer.trackers import TRAIN

CURVES: Mapping[str, Mapping[str, str]] = {
    "score": {
        "train/score": "score, sampled",
        "train/accuracy": "accuracy, sampled",
        "held_out/score": "score, held-out problems",
        "held_out/accuracy": "accuracy, held-out problems",
    },
    "per token": {
        "actor/reward_kl_penalty": "KL to the reference",
        "actor/kl_loss": "KL to the reference, in the loss",
        "actor/entropy": "entropy",
    },
}
"""By the label of the axis, the metrics that are drawn and their names in the legend."""


def draw_curves(directory: Path) -> Path:
    """Draw the metrics of ``CURVES`` that a run has over its steps, and return the path of ``curves.png``.

    Of a step that a resumed run repeated, the last value is drawn.

    Args:
        directory: of the run; contains ``metrics.jsonl``, of the tracker ``jsonl``.

    Raises:
        ImportError: there is no matplotlib.
    """
    from matplotlib.figure import Figure

    lines = records_of((directory / "metrics.jsonl").read_bytes())
    records = [
        record for record in lines if record.get("phase") == TRAIN and isinstance(record.get("global_step"), int)
    ]
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, (label, names) in zip(figure.subplots(1, 2), CURVES.items(), strict=True):
        for name, legend in names.items():
            with_value = [record for record in records if isinstance(record.get(name), int | float)]
            points = dict(sorted((record["global_step"], record[name]) for record in with_value))
            if points:
                axes.plot(list(points), list(points.values()), label=legend, marker="." if len(points) < 20 else None)
        axes.set(xlabel="step", ylabel=label)
        if axes.lines:
            axes.legend()
    path = directory / "curves.png"
    figure.savefig(path, dpi=120)
    return path
