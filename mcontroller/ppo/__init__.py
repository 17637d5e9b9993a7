"""The PPO-family controller program: how it is configured, what it computes itself, and the trainer that drives it."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "advantages": (
        "ADVANTAGE_ESTIMATORS",
        "AdvantageEstimator",
        "compute_advantage",
        "compute_gae",
        "register_advantage_estimator",
    ),
    "config": ("AlgorithmConfig", "DataConfig", "KLControlConfig", "PPOConfig", "TrainerConfig", "WarmUpConfig"),
    "data": ("BatchStream", "collate"),
    "display": ("Display",),
    "kl": (
        "KL_CONTROLLERS",
        "KL_ESTIMATORS",
        "AdaptiveKLController",
        "FixedKLController",
        "apply_kl_penalty",
        "estimate_kl",
    ),
    "progress": ("ProgressDisplay",),
    "rewards": ("Reward", "RewardFunction", "outcome_scores"),
    "stages": ("Stages",),
    "trainer": ("RayPPOTrainer",),
}
_HOME = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
