"""A worker class, and next to it the loss and the estimator that its module registers."""

from __future__ import annotations

from typing import Any

import torch

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.worker import Worker
from trainer import KL_ESTIMATORS, POLICY_LOSSES, PolicyLoss, register_kl_estimator, register_policy_loss


@register_policy_loss("of_a_module")
def loss(log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any, **clip: Any) -> PolicyLoss:
    ratio = torch.exp(log_probs - old_log_probs)
    return PolicyLoss(-3 * advantages * ratio, ratio, torch.zeros_like(ratio))


@register_kl_estimator("of_a_module")
def estimate(log_ratio: Any) -> Any:
    return 5 * log_ratio


class Learner(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compute(self, name: str) -> tuple[float, float]:
        zeros, ones = torch.zeros(1), torch.ones(1)
        clip = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
        return POLICY_LOSSES[name].function(zeros, zeros, ones, ones, **clip).loss.item(), KL_ESTIMATORS[name](
            ones
        ).item()
