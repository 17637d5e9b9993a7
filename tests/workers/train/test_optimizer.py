"""The learning rate of each step follows the formula of its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from workers.config import DECAY_STYLES, OptimConfig
from workers.train.optimizer import make_scheduler

LR, MIN_LR, WARMUP, TOTAL, WSD = 1.0, 0.1, 4, 20, 6


def rates(decay_style: str, steps: int = 26) -> list[float]:
    """Return the learning rate at each step of the optimizer, first before any step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    config = OptimConfig(
        lr=LR,
        min_lr=MIN_LR,
        warmup_steps=WARMUP,
        total_steps=TOTAL,
        decay_style=decay_style,
        wsd_decay_steps=WSD if decay_style == "WSD" else 0,
    )
    scheduler = make_scheduler(optimizer, config)  # type: ignore[arg-type]
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step(1)
    return found


def progress(step: int) -> float:
    """Return the progress from the end of the warm-up (0) to the end of the schedule (1)."""
    return (step - WARMUP) / (TOTAL - WARMUP)


FORMULAS: dict[str, Callable[[int], float]] = {
    "constant": lambda step: LR,
    "linear": lambda step: LR + (MIN_LR - LR) * progress(step),
    "cosine": lambda step: MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * progress(step))) / 2,
    "inverse-square-root": lambda step: LR * math.sqrt(WARMUP / step),
    "WSD": lambda step: LR - (LR - MIN_LR) * max(step - (TOTAL - WSD), 0) / WSD,
}


@pytest.mark.parametrize("decay_style", DECAY_STYLES)
def test_learning_rate_follows_its_schedule(decay_style: str) -> None:
    found = rates(decay_style)
    assert found[:WARMUP] == pytest.approx([LR * step / WARMUP for step in range(WARMUP)])
    assert found[WARMUP : TOTAL + 1] == pytest.approx([FORMULAS[decay_style](at) for at in range(WARMUP, TOTAL + 1)])
    assert found[TOTAL + 1 :] == pytest.approx([LR if decay_style == "constant" else MIN_LR] * 5)
