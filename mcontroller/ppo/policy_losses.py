"""Policy losses by name, token by token.

Define a policy loss next to the worker class, so that every Ray worker that imports the class registers it too, and
choose it with ``actor_rollout_ref.policy_loss=mine``::

    @register_policy_loss("mine")
    def mine(log_probs, old_log_probs, advantages, mask, *, clip_low, clip_high, dual_clip):
        ratio = torch.exp(log_probs - old_log_probs)
        return PolicyLoss(-advantages * ratio, ratio, torch.zeros_like(ratio))

    class MyActor(ActorRolloutRefWorker): ...

A registration in a program's main file is not enough: Ray workers do not run that file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from mcontroller.config.registry import Registry

__all__ = ["POLICY_LOSSES", "PolicyLoss", "PolicyLossFunction", "clipped_policy_loss", "register_policy_loss"]


class PolicyLoss(NamedTuple):
    """A policy loss of every token; all tensors are float ``[rows, response]``.

    Attributes:
        loss: the loss, to be minimized. The caller sums it over the mask and divides it by the tokens of the batch.
        ratio: the probability ratio ``exp(log_probs - old_log_probs)``, for metrics.
        clipped: 1 for tokens whose loss is determined by clipping, otherwise 0, for metrics.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


class PolicyLossFunction(Protocol):
    """A function of tensors that returns a ``PolicyLoss``."""

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None,
    ) -> PolicyLoss:
        """Return the loss of every token.

        Args:
            log_probs: ``[rows, response]``, natural logarithms under the policy in training, with gradients.
            old_log_probs: ``[rows, response]``, the same under the policy that sampled.
            advantages: ``[rows, response]``.
            mask: ``[rows, response]``, 1 for the tokens that count. With cp > 1, the tokens of this rank only.
            clip_low: ``clip_ratio_low`` of the configuration, or ``clip_ratio``.
            clip_high: ``clip_ratio_high`` of the configuration, or ``clip_ratio``.
            dual_clip: ``clip_ratio_c`` of the configuration.
        """


POLICY_LOSSES: Registry[PolicyLossFunction] = Registry("policy loss", key="policy_loss")
"""Policy losses by the name that ``ActorConfig.policy_loss`` takes."""

F = TypeVar("F", bound=PolicyLossFunction)


def register_policy_loss(name: str) -> Callable[[F], F]:
    """Return a decorator that registers a policy loss under ``name``.

    Raises:
        ConfigError: another policy loss is registered under this name.
    """
    return POLICY_LOSSES.register(name)


@register_policy_loss("ppo")
def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return PPO's clipped surrogate (Schulman et al., 2017, arXiv:1707.06347, equation 7), negated.

    Args:
        log_probs: ``[rows, response]``, natural logarithms under the policy in training.
        old_log_probs: ``[rows, response]``, the same under the policy that sampled.
        advantages: ``[rows, response]``.
        mask: ``[rows, response]``; not used, since the loss of a token depends on this token alone.
        clip_low: the ratio is clipped below ``1 - clip_low``.
        clip_high: the ratio is clipped above ``1 + clip_high``.
        dual_clip: for a negative advantage the loss is at most ``-dual_clip * advantage`` (Ye et al., 2020,
            arXiv:1912.09729, equation 5). None: no limit.
    """
    ratio = torch.exp((log_probs - old_log_probs).clamp(-20.0, 20.0))
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, bounded)
    clipped = bounded > free
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        clipped = clipped | over
    return PolicyLoss(loss, ratio, clipped.to(loss.dtype))
