from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from examples.ppo.report import accuracy_before_and_after, read_metrics, write_report

LINES = [
    {"global_step": 1, "sft/loss": 2.0},
    {"global_step": 0, "held_out/accuracy": 0.25, "held_out/score": 0.3},
    {"global_step": 1, "train/score": 0.3, "train/accuracy": 0.2, "actor/reward_kl_penalty": 0.0, "actor/entropy": 0.5},
    {"global_step": 2, "train/score": 0.6, "train/accuracy": 0.5, "actor/entropy": 0.4, "held_out/accuracy": 0.75},
]


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (tmp_path / "summary.json").write_text(json.dumps({"wall_s": 10.0, "stages_s": {"generate": 3.0}}))
    return tmp_path


def test_accuracy_is_that_of_the_first_and_the_last_measurement(run_dir):
    assert accuracy_before_and_after(read_metrics(run_dir / "metrics.jsonl")) == (0.25, 0.75)


def test_the_report_adds_the_accuracy_to_the_summary(run_dir):
    out = io.StringIO()
    write_report(run_dir, Console(file=out, width=200))
    text = out.getvalue()
    assert "0.250 before PPO, 0.750 after it (+0.500) in 10 s" in text
    assert json.loads((run_dir / "summary.json").read_text()) | {"accuracy_before": 0.25} == {
        "accuracy_before": 0.25,
        "accuracy_after": 0.75,
        "wall_s": 10.0,
        "stages_s": {"generate": 3.0},
    }
