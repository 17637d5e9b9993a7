"""Tolerances by precision, each with its reason, and the differences that are compared with them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workers.gpucheck.policy import ROWS

__all__ = ["TOLERANCES", "Tolerance", "largest_difference", "score_difference"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest accepted differences between two devices.

    Attributes:
        mean: whether differences of log-probabilities are averaged over tokens; otherwise the largest one counts.
        scores: of log-probabilities with equal weights; also of those that generation and scoring return.
        weights: of parameters after the updates, whose four steps are up to 1e-3 each; None if rounding hides steps.
        after: of log-probabilities after the updates.
        metrics: of gradient norms and losses, relative to 1 or to the value if it is larger.
        rows: of rows of tokens: the number of rows that may differ.
        again: of log-probabilities after the updates, computed twice on one device.
    """

    mean: bool
    scores: float
    weights: float | None
    after: float
    metrics: float
    rows: int
    again: float


TOLERANCES: dict[str, Tolerance] = {
    # 24 bits of mantissa: sums of a few hundred terms in another order differ by 1e-6 of their size. Adam divides by
    # the gradient's own size, so an update enlarges that. A row of tokens differs if two tokens are nearly as likely.
    "float32": Tolerance(mean=False, scores=2e-4, weights=2e-4, after=5e-3, metrics=2e-3, rows=1, again=2e-3),
    # 11 bits of mantissa: Transformer Engine multiplies float32 matrices in TF32.
    "tf32": Tolerance(mean=True, scores=5e-3, weights=2e-3, after=2e-2, metrics=5e-2, rows=ROWS // 2, again=5e-3),
    # 8 bits of mantissa: hidden states are rounded after every operation, to 0.4% of their size. A token that is nearly
    # as close to another expert may go there, so single log-probabilities differ by more, and their mean is compared.
    # On the CPU, bfloat16 differs from float32 by 0.004 to 0.007 in scores, and by 0.01 to 0.17 after the updates,
    # whose steps move scores by 0.9 to 1.4.
    "bfloat16": Tolerance(mean=True, scores=2e-2, weights=None, after=0.3, metrics=0.2, rows=ROWS, again=2e-2),
}
"""Tolerances by precision of the arithmetic."""


def largest_difference(value: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference; infinity if the shapes differ, NaN if a value is NaN."""
    if value.shape != reference.shape:
        return float("inf")
    return float((value.double() - reference.double()).abs().max()) if value.numel() else 0.0


def score_difference(value: Tensor, reference: Tensor, tolerance: Tolerance) -> float:
    """Return the mean or the largest difference of log-probabilities, ``[rows, response]``; 0 is padding in both."""
    if not tolerance.mean or value.shape != reference.shape:
        return largest_difference(value, reference)
    return float((value.double() - reference.double()).abs().sum() / (reference != 0).sum().clamp(min=1))
