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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from mcontroller.config.checks import check_above
from mcontroller.config.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS: Registry[Aggregation] = Registry("aggregation of the loss", key="loss_agg_mode")
"""Modes by the name that ``ActorConfig.loss_agg_mode`` takes."""
POLICY_LOSSES: Registry[RegisteredPolicyLoss] = Registry("policy loss", key="policy_loss")
"""Policy losses by the name that ``ActorConfig.policy_loss`` takes."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of an average over tokens.

    Attributes:
        tokens: float ``[rows, response]``, the weight of every token; 0 outside of the mask.
        count: float scalar: this part's share of what the weighted sum is divided by.
    """

    tokens: Tensor
    count: Tensor


Aggregation = Callable[["Tensor", "Tensor", int], Weights]
"""Maps the mask of this rank's tokens, the mask of all tokens, and the longest possible response to ``Weights``.

Both masks are float ``[rows, response]``. They differ under context parallelism, where ranks share the tokens of a
response. A response is counted on the rank that has its first token.
"""


@AGGREGATIONS.register("token-mean")
def _token_mean(local: Tensor, whole: Tensor, longest: int) -> Weights:
    """Each token counts once (DAPO, arXiv:2503.14476)."""
    return Weights(local, local.sum())


@AGGREGATIONS.register("seq-mean-token-mean")
def _sequence_mean_of_means(local: Tensor, whole: Tensor, longest: int) -> Weights:
    """Each response counts once, whatever its length (GRPO, arXiv:2402.03300)."""
    return Weights(local / whole.sum(1, keepdim=True).clamp(min=1), _responses(local, whole))


@AGGREGATIONS.register("seq-mean-token-sum")
def _sequence_mean_of_sums(local: Tensor, whole: Tensor, longest: int) -> Weights:
    """The mean over responses of their summed tokens."""
    return Weights(local, _responses(local, whole))


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def _constant_length(local: Tensor, whole: Tensor, longest: int) -> Weights:
    """As seq-mean-token-sum, divided by the longest possible response (Dr.GRPO, arXiv:2503.20783)."""
    return Weights(local / longest, _responses(local, whole))


def _responses(local: Tensor, whole: Tensor) -> Tensor:
    """Return the number of responses whose first token is among this rank's."""
    first = (whole != 0) & ((whole != 0).cumsum(1) == 1)
    return (first & (local != 0)).sum().to(local.dtype)


class PolicyLoss(NamedTuple):
    """A policy loss of every token; all tensors are float ``[rows, response]``.

    Attributes:
        loss: the loss, to be minimized. The caller averages it over the mask (``loss_agg_mode``).
        ratio: the probability ratio ``exp(log_probs - old_log_probs)``, for metrics.
        clipped: 1 for tokens whose loss is determined by clipping, otherwise 0, for metrics.
        metrics: values that are averaged over tokens and reported, by the names that the loss is registered with.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    metrics: Mapping[str, Tensor] = MappingProxyType({})


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
        columns: other columns of the batch that it reads, ``[rows, response]``.
        whole_sequences: whether it combines the tokens of a response, so that it needs all of them under cp too.
        loss_agg_mode: how it is averaged, unless the configuration sets another mode.
        clip_low: its ``clip_low``, unless the configuration sets ``clip_ratio_low`` or ``clip_ratio``.
        clip_high: its ``clip_high``, unless the configuration sets ``clip_ratio_high`` or ``clip_ratio``.
        unused: the fields of ``ActorConfig`` about clipping that it does not read.
        metrics: the names of the metrics that it returns.
    """

    function: PolicyLossFunction
    columns: tuple[str, ...] = ()
    whole_sequences: bool = False
    loss_agg_mode: str = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    unused: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


F = TypeVar("F", bound=Callable[..., PolicyLoss])


def register_policy_loss(
    name: str,
    *,
    columns: Sequence[str] = (),
    whole_sequences: bool = False,
    loss_agg_mode: str = "token-mean",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    unused: Sequence[str] = (),
    metrics: Sequence[str] = (),
) -> Callable[[F], F]:
    """Return a decorator that registers a policy loss under ``name``.

    Args:
        name: the value of ``policy_loss`` that chooses it.
        columns: other columns of the batch that it reads, ``[rows, response]``. The function gets them as
            ``columns``, a mapping; ``update_actor`` requires them.
        whole_sequences: whether it combines the tokens of a response. Under context parallelism it then gets the
            log-probabilities of all tokens; otherwise of this rank only.
        loss_agg_mode: how it is averaged unless the configuration sets another mode: a name in ``AGGREGATIONS``.
        clip_low: its ``clip_low`` unless the configuration sets one; above 0. A ratio is never below 0, so 1 is no
            lower limit of a ratio.
        clip_high: its ``clip_high`` unless the configuration sets one; above 0.
        unused: the fields of ``ActorConfig`` about clipping that it does not read, such as ``clip_ratio_c``; they are
            rejected with it.
        metrics: the names in ``PolicyLoss.metrics``, always the same, reported as ``actor/NAME``.

    Raises:
        ConfigError: another policy loss is registered under this name, there is no such ``loss_agg_mode``, or a limit
            is not above 0.
    """
    AGGREGATIONS.get_or_raise(loss_agg_mode)
    check_above("clip_low", clip_low, 0.0)
    check_above("clip_high", clip_high, 0.0)

    def add(function: F) -> F:
        registered = RegisteredPolicyLoss(
            function,
            tuple(columns),
            whole_sequences,
            loss_agg_mode,
            clip_low=clip_low,
            clip_high=clip_high,
            unused=tuple(unused),
            metrics=tuple(metrics),
        )
        POLICY_LOSSES.add(name, registered)
        return function

    return add
