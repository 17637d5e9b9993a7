"""The learning rate of each step follows the formula of its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from mcontroller.errors import ConfigError
from workers.config import DECAY_STYLES, OptimConfig
from workers.train.optimizer import make_scheduler

LR, MIN_LR, WARMUP, TOTAL, WSD = 1.0, 0.1, 4, 20, 6


def rates(decay_style: str, steps: int = 26, start: float = 0.0) -> list[float]:
    """Return the learning rate at each step of the optimizer, first before any step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    decay = {} if decay_style == "constant" else {"min_lr": MIN_LR, "total_steps": TOTAL}
    decay |= {"wsd_decay_steps": WSD} if decay_style == "WSD" else {}
    config = OptimConfig(lr=LR, warmup_steps=WARMUP, warmup_init_lr=start, decay_style=decay_style, **decay)
    scheduler = make_scheduler(optimizer, config)  # type: ignore[arg-type]
    learning_rates = []
    for _ in range(steps):
        learning_rates.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step(1)
    return learning_rates


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
    actual = rates(decay_style)
    assert actual[:WARMUP] == pytest.approx([LR * step / WARMUP for step in range(WARMUP)])
    assert actual[WARMUP : TOTAL + 1] == pytest.approx([FORMULAS[decay_style](at) for at in range(WARMUP, TOTAL + 1)])
    assert actual[TOTAL + 1 :] == pytest.approx([LR if decay_style == "constant" else MIN_LR] * 5)


def test_the_warm_up_begins_at_its_first_rate() -> None:
    assert rates("constant", 6, start=0.2) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    for settings in ({"warmup_steps": 4, "warmup_init_lr": 2e-5}, {"warmup_init_lr": 1e-6}, {"warmup_init_lr": -1e-6}):
        with pytest.raises(ConfigError) as caught:
            OptimConfig(lr=1e-5, **settings)  # type: ignore[arg-type]
        assert caught.value.key.removeprefix("optim.") == "warmup_init_lr"
