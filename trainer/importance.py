"""Configuration of importance weights in the policy loss; ``trainer.mismatch`` computes them."""

from __future__ import annotations

from dataclasses import dataclass

from mcontroller.config.checks import check_above, check_at_least, check_one_of
from mcontroller.config.fields import check_unused, strict_fields

LEVELS = ("none", "token", "sequence", "geometric")
MODES = ("truncate", "mask", "decoupled")


@strict_fields
@dataclass(frozen=True, slots=True)
class ImportanceConfig:
    """Importance weights ``policy / rollout`` of the sampled tokens in the policy loss; see docs/rollout.md."""

    level: str = "none"
    """Weight of a token: its own ratio (token), the product of the ratios of its response (sequence), their geometric
    mean (geometric), or none."""
    mode: str = "truncate"
    """Limit of the weights: truncate to threshold, mask the tokens whose weight is outside of the limits, or none as in
    decoupled PPO (decoupled)."""
    threshold: float = 2.0
    """Highest weight. Not with mode=decoupled."""
    least: float = 0.0
    """Lowest weight that is not masked; 0 keeps all. Only with mode=mask."""
    off_policy_mask: float | None = None
    """[nats per token] Leave responses with a negative advantage out of the loss if the rollout gave their tokens
    a log-probability that is higher by more than this, in the mean, than the policy's. None: keep all."""

    def __post_init__(self) -> None:
        check_one_of("algorithm.importance.level", self.level, LEVELS)
        check_one_of("algorithm.importance.mode", self.mode, MODES)
        check_above("algorithm.importance.threshold", self.threshold, 0.0)
        if self.off_policy_mask is not None:
            check_at_least("algorithm.importance.off_policy_mask", self.off_policy_mask, 0.0)
        key = "algorithm.importance."
        if self.level == "none":
            reason = f"without weights: set {key}level to token, sequence or geometric"
            check_unused(self, ("mode", "threshold", "least"), key, reason)
        if self.mode == "decoupled":
            check_unused(self, ("threshold",), key, f"with {key}mode=decoupled, which has no limit")
        if self.mode != "mask":
            check_unused(self, ("least",), key, f"with {key}mode={self.mode}: set mode=mask")

    @property
    def is_on(self) -> bool:
        """Whether a correction reads the log-probabilities of the policy."""
        return self.level != "none" or self.off_policy_mask is not None
