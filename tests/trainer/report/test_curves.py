"""The picture of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.report.curves import draw_curves

image = pytest.importorskip("matplotlib.image")


def test_the_picture_has_the_curves_that_the_run_logged(tmp_path: Path) -> None:
    lines = [{"global_step": step, "phase": "train", "train/score": step / 4} for step in range(5)]

    def picture(*more: dict) -> Any:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*more, *lines)))
        return image.imread(draw_curves(tmp_path))

    alone = picture()
    assert alone.shape == (480, 1320, 4)
    assert (picture({"global_step": 1, "phase": "warm_up", "train/score": 2.0}) == alone).all()
    assert (picture({"global_step": 2, "phase": "train", "actor/entropy": 0.5}) != alone).any()
