"""Policy losses by name, token by token.

Define a policy loss next to the worker class, so that every Ray worker that imports the class registers it too, and
choose it with ``actor_rollout_ref.policy_loss=mine``::

    @register_policy_loss("mine", columns=("rollout_log_probs",))
    def mine(log_probs, old_log_probs, advantages, mask, *, clip_low, clip_high, dual_clip, columns):
        ratio = torch.exp(log_probs - columns["rollout_log_probs"])
        return PolicyLoss(-advantages * ratio, ratio, torch.zeros_like(ratio))

    class MyActor(ActorRolloutRefWorker): ...

A registration in a program's main file is not enough: Ray workers do not run that file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from mcontroller.config.checks import check_above
from mcontroller.config.registry import Registry
from mcontroller.ppo.losses.aggregation import AGGREGATIONS

__all__ = ["POLICY_LOSSES", "PolicyLoss", "PolicyLossFunction", "RegisteredPolicyLoss", "register_policy_loss"]


class PolicyLoss(NamedTuple):
    """A policy loss of every token; all tensors are float ``[rows, response]``.

    Attributes:
        loss: the loss, to be minimized. The caller averages it over the mask (``loss_agg_mode``).
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
        """Return the loss of every token. A loss with ``columns`` also gets them, as a mapping of that name.

        Args:
            log_probs: ``[rows, response]``, natural logarithms under the policy in training, with gradients.
            old_log_probs: ``[rows, response]``, the same under the policy that sampled.
            advantages: ``[rows, response]``.
            mask: ``[rows, response]``, 1 for the tokens that count. With cp > 1 the tokens of this rank only, unless
                the loss is registered with ``whole_sequences``.
            clip_low: ``clip_ratio_low`` of the configuration, or ``clip_ratio``, or the default of the loss.
            clip_high: ``clip_ratio_high`` of the configuration, or ``clip_ratio``, or the default of the loss.
            dual_clip: ``clip_ratio_c`` of the configuration.
        """


@dataclass(frozen=True)
class RegisteredPolicyLoss:
    """A policy loss.

    Attributes:
        function: its function.
        columns: further columns of the batch that it reads, ``[rows, response]``.
        whole_sequences: whether it combines the tokens of a response, so that it needs all of them under cp too.
        loss_agg_mode: how it is averaged, unless the configuration sets another mode.
        clip_low: its ``clip_low``, unless the configuration sets ``clip_ratio_low`` or ``clip_ratio``.
        clip_high: its ``clip_high``, unless the configuration sets ``clip_ratio_high`` or ``clip_ratio``.
    """

    function: PolicyLossFunction
    columns: tuple[str, ...] = ()
    whole_sequences: bool = False
    loss_agg_mode: str = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.2


POLICY_LOSSES: Registry[RegisteredPolicyLoss] = Registry("policy loss", key="policy_loss")
"""Policy losses by the name that ``ActorConfig.policy_loss`` takes."""

F = TypeVar("F", bound=Callable[..., PolicyLoss])


def register_policy_loss(
    name: str,
    *,
    columns: Sequence[str] = (),
    whole_sequences: bool = False,
    loss_agg_mode: str = "token-mean",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Callable[[F], F]:
    """Return a decorator that registers a policy loss under ``name``.

    Args:
        name: the value of ``policy_loss`` that chooses it.
        columns: further columns of the batch that it reads, ``[rows, response]``. The function gets them as
            ``columns``, a mapping; ``update_actor`` requires them.
        whole_sequences: whether it combines the tokens of a response. Under context parallelism it then gets the
            log-probabilities of all tokens; otherwise those of this rank only.
        loss_agg_mode: how it is averaged unless the configuration sets another mode: a name in ``AGGREGATIONS``.
        clip_low: its ``clip_low`` unless the configuration sets one; above 0. A ratio is never below 0, so 1 is no
            lower limit of a ratio.
        clip_high: its ``clip_high`` unless the configuration sets one; above 0.

    Raises:
        ConfigError: another policy loss is registered under this name, there is no such ``loss_agg_mode``, or a limit
            is not above 0.
    """
    AGGREGATIONS.get_or_raise(loss_agg_mode)
    check_above("clip_low", clip_low, 0.0)
    check_above("clip_high", clip_high, 0.0)

    def add(function: F) -> F:
        registered = RegisteredPolicyLoss(
            function, tuple(columns), whole_sequences, loss_agg_mode, clip_low=clip_low, clip_high=clip_high
        )
        POLICY_LOSSES.add(name, registered)
        return function

    return add
