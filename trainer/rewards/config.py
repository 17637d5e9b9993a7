"""Configuration of the reward functions of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcontroller.config.checks import check_above, check_at_least, check_finite
from mcontroller.config.fields import strict_fields, unused_if
from mcontroller.errors import ConfigError
from trainer.metrics import name_conflict

RESERVED_COLUMNS = ("prompt", "response", "answer", "tokens", "reward_failed", "rule_score", "model_score")
"""Names that samples and the combination of rewards have, besides those of the trainer's metrics."""


@strict_fields
@dataclass(frozen=True, slots=True)
class RewardFunctionConfig:
    """One reward function."""

    function: str
    """The function: ``package.module:name``, or ``directory/file.py:name``."""
    weight: float = 1.0
    """Factor of its scores in their sum."""
    batch: bool = False
    """Call it once with lists of the values of all samples, instead of once for each sample."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other keyword arguments of every call."""

    def __post_init__(self) -> None:
        check_finite("weight", self.weight)


@strict_fields
@dataclass(frozen=True, slots=True)
class RewardsConfig:
    """The reward functions, and the processes that call them."""

    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    """Reward functions by the name that metrics use. Their scores are added with their weights."""
    processes: int = unused_if(2, functions={})
    """[processes] Processes that call them, on the machine of the controller."""
    timeout_s: float = unused_if(60.0, functions={})
    """[s] Longest time for a sample, or for a batch with ``batch=true``."""
    failed_score: float | None = unused_if(None, functions={})
    """Score, before ``weight``, by a function that raises or does not return in time. None: the response is not trained
    on."""

    def __post_init__(self) -> None:
        check_at_least("rewards.processes", self.processes, 1)
        check_above("rewards.timeout_s", self.timeout_s, 0.0)
        if self.failed_score is not None:
            check_finite("rewards.failed_score", self.failed_score)
        for name in self.functions:
            if not name.replace("_", "").isalnum():
                raise ConfigError(
                    f"rewards.functions has the name {name!r}; expected letters, digits and underscores",
                    key="rewards.functions",
                    value=name,
                )
        if conflict := name_conflict(self.functions, RESERVED_COLUMNS):
            name, owner = conflict
            raise ConfigError(
                f"rewards.functions has the name {name!r}, and metrics and samples of this name are those of {owner}: "
                "choose another one",
                key="rewards.functions",
                value=name,
            )
