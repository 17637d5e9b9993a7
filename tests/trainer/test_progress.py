from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from trainer import ProgressDisplay
from trainer.display import LINES_PER_PHASE


def display(**options) -> tuple[ProgressDisplay, io.StringIO]:
    out = io.StringIO()
    return ProgressDisplay(Console(file=out, width=120, color_system=None, **options)), out


def test_a_step_shows_reward_accuracy_kl_and_tokens_per_second():
    shown, out = display(force_terminal=True, force_interactive=True)
    shown.phase("PPO", 3)
    shown.step(
        {
            "train/score": 0.5,
            "train/accuracy": 0.25,
            "actor/reward_kl_penalty": 0.0123,
            "perf/tokens_per_s": 4321.6,
            "actor/lr": 1.0,
        }
    )
    shown.close()
    assert "1/3 reward 0.500  accuracy 0.250  KL 0.0123  tokens/s 4,322" in out.getvalue()


@pytest.mark.parametrize("steps", [3, 15, 100])
def test_without_a_terminal_a_phase_prints_few_lines_and_its_last_step(steps):
    shown, out = display()
    shown.phase("warm-up", steps)
    for _ in range(steps):
        shown.step({"sft/loss": 0.125})
    shown.close()
    lines = out.getvalue().splitlines()
    assert len(lines) <= LINES_PER_PHASE and lines[-1] == f"warm-up {steps}/{steps}  loss 0.125"


def test_held_out_statistics_and_a_score_that_is_a_functions_own_are_not_repeated():
    shown, out = display()
    statistics = {"held_out/score": 0.7, "held_out/score_std": 0.4, "held_out/score_min": 0.0}
    own = {"held_out/right": 0.699999988079071}  # the same in float32
    shown.held_out(8, {**statistics, **own, "held_out/other/score": 0.75, "held_out/other/format": 1.0})
    assert re.findall(r"([a-z/]+) ([0-9.]+)", out.getvalue().partition(": ")[2]) == [
        ("score", "0.700"),
        ("other/score", "0.750"),
        ("other/format", "1.000"),
    ]


def test_samples_do_not_push_the_progress_out_of_the_window():
    shown, out = display()
    shown.phase("GRPO", 80)
    for _ in range(80):
        shown.samples([{"prompt": "1+1=", "response": "2", "score": 1.0}] * 16)
        shown.step({"train/score": 0.5})
    lines = out.getvalue().splitlines()
    assert sum("GRPO" in line for line in lines) == 8
    assert len(lines) == 24
