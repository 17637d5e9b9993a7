"""Judge from log-probabilities of a few fixed prompts whether an engine has followed an update of the policy.

The difference of engine and policy at one time says little: rounding makes it larger than what one update changes. But
rounding makes it as large before an update as after it, if the weights have arrived. If a part of the update is
missing, the mean square of the difference grows by that of the missing part of the change. So differences before and
after are compared token by token, and their scatter over the prompts is the error of the result.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

__all__ = ["SIGMAS", "CanaryScores", "CanaryVerdict", "judge"]

SIGMAS = 5.0
"""Standard errors by which a share of the change must be missing before it is reported."""

VISIBLE = 0.25
"""An update is judged if a missing part with this share of the change would be reported."""

_NEGLIGIBLE = 1e-3  # share of the change below which a difference is not reported, however certain it is
_DRIFT = 0.05  # share by which rounding may grow while the policy is trained
_STILL = 1e-4  # an engine whose change has less than this share of the policy's has not moved
_FAR = 0.5  # share of the variance of log-probabilities by which weights that were never compared may differ
_FEWEST = 8


class CanaryScores(NamedTuple):
    """Responses of an engine to the canary prompts.

    Attributes:
        tokens: int64 ``[prompts, response]``, those that the engine sampled with fixed seeds.
        engine: float64 ``[prompts, response]``, their log-probabilities as the engine reports them.
        policy: float64 ``[prompts, response]``, those of the policy.
    """

    tokens: Tensor
    engine: Tensor
    policy: Tensor


class CanaryVerdict(NamedTuple):
    """The result of a comparison.

    Attributes:
        arrived: True or False; None if the change is too small to be judged.
        lost: the share of the policy's change that is not in the engine's; NaN without a change.
        error: the standard error of ``lost``; infinite if the change cannot be told from rounding.
        moved: the mean square of the engine's change, divided by that of the policy's; NaN without a change.
        mismatch: the mean absolute difference of engine and policy before and after, in nats.
        tokens: how many tokens were compared.
        prompts: the prompts whose difference grew most.
    """

    arrived: bool | None
    lost: float
    error: float
    moved: float
    mismatch: tuple[float, float]
    tokens: int
    prompts: list[int]


def judge(before: CanaryScores | None, after: CanaryScores) -> CanaryVerdict:
    """Compare the engine's change with the policy's.

    Only tokens up to the first one that the engine sampled differently are compared: they follow the same tokens.

    Args:
        before: scores with weights that the engine had received; None if there are none.
        after: scores with the weights that it is to have now.
    """
    late = after.engine - after.policy
    if before is None:
        return _judge_levels(after, late)
    same = (before.tokens == after.tokens).long().cumprod(1).bool()
    early = before.engine - before.policy
    counts = same.sum(1).clamp(min=1)
    if int(same.any(1).sum()) < _FEWEST:
        return _judge_levels(after, late)

    def of_prompts(values: Tensor) -> Tensor:
        return ((values * same).sum(1) / counts)[same.any(1)]

    policy = float(of_prompts((after.policy - before.policy) ** 2).mean())
    engine = float(of_prompts((after.engine - before.engine) ** 2).mean())
    mismatch = float(of_prompts(early.abs()).mean()), float(of_prompts(late.abs()).mean())
    grown, noise = of_prompts(late**2 - early**2), float(of_prompts(early**2).mean())
    growth, scatter = float(grown.mean()), float(grown.std()) / math.sqrt(len(grown))
    signal = policy - noise  # rounding of both is in the difference, and about as much of it in the change
    lost, error = (growth / signal, scatter / signal) if signal > 0 else (math.nan, math.inf)
    moved = engine / policy if policy else math.nan
    missing = growth > SIGMAS * scatter and growth > max(_NEGLIGIBLE * policy, _DRIFT * noise)
    arrived: bool | None = True
    if missing or moved < _STILL:
        arrived = False
        lost = 1.0 if moved < _STILL else lost
    elif SIGMAS * error > VISIBLE:
        arrived = None
    worst = same.any(1).nonzero().flatten()[grown.argsort(descending=True)[:4]].tolist()
    return CanaryVerdict(arrived, lost, error, moved, mismatch, int(same.sum()), worst)


def _judge_levels(scores: CanaryScores, difference: Tensor) -> CanaryVerdict:
    """Report weights that were never compared only if they are others altogether."""
    spread = float(scores.policy.var())
    by_prompt = (difference**2).mean(1)
    far = float(by_prompt.mean()) > _FAR * spread
    worst = by_prompt.argsort(descending=True)[:4].tolist()
    mismatch = math.nan, float(difference.abs().mean())
    return CanaryVerdict(False if far else None, math.nan, math.inf, math.nan, mismatch, difference.numel(), worst)
