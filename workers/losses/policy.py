"""The policy losses by name, token by token, and the averages over tokens.

Define a policy loss next to the worker class, so that every Ray worker that imports the class registers it too, or in a
module that ``imports`` of a run names, and choose it with ``actor_rollout_ref.policy_loss=mine``::

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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from mcontroller.config.checks import check_above, check_one_of
from mcontroller.config.registry import Registry
from mcontroller.errors import ConfigError
from parallel_state.lazy import Lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Lazy("torch")

AGGREGATIONS: Registry[Aggregation] = Registry("aggregation of the loss", key="loss_agg_mode")
"""Modes by the name that ``ActorConfig.loss_agg_mode`` takes."""
POLICY_LOSSES: Registry[RegisteredPolicyLoss] = Registry("policy loss", key="policy_loss")
"""Policy losses by the name that ``ActorConfig.policy_loss`` takes."""
TOKEN_MEANS = ("pg_clipfrac", "pg_clipfrac_low", "pg_clipfrac_high", "ppo_kl", "entropy")
"""Metrics of every policy loss that are means over tokens."""
_CLIPPING = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
_REPORTED = (
    *TOKEN_MEANS,
    *("kl_loss", "pg_loss", "ratio_max", "tokens", "loss_count", "loss_size"),
    *("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max", "training/rollout_kl"),
)


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
        ConfigError: another policy loss is registered under this name, there is no such ``loss_agg_mode`` or field of
            clipping, a limit is not above 0, or a metric has the name of another one.
    """
    check_names("columns", columns)
    check_names("metrics", metrics)
    check_names("unused", unused)
    for field in unused:
        check_one_of("unused", field, _CLIPPING)
    if taken := sorted(set(metrics) & set(_REPORTED)):
        raise ConfigError(
            f"metrics has {', '.join(taken)}, which every policy loss reports: choose other names", key="metrics"
        )
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


def check_names(key: str, names: Any) -> None:
    """Check that names are a sequence of strings, and not one string, whose letters would be taken for names."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{key} is {names!r}; expected a tuple of names, such as ({str(names)!r},)", key=key, value=names
        )


def check_of_tokens(key: str, name: str, values: Mapping[str, Any], log_probs: Tensor) -> None:
    """Check what a registered function returned: tensors in the shape of ``log_probs``, the first one with gradients.

    Args:
        key: of the configuration that chose the function.
        name: of the function.
        values: what it returned, by what they are.
        log_probs: ``[rows, response]``; if it has no gradients, none are expected.

    Raises:
        ConfigError: one is no such tensor.
    """
    for which, value in values.items():
        if not isinstance(value, torch.Tensor) or value.shape != log_probs.shape:
            given = list(value.shape) if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"
            text = f"{key}={name}: {which} is {given}; expected a tensor with a value of every token, "
            raise ConfigError(f"{text}{list(log_probs.shape)}", key=key, value=name)
    which, value = next(iter(values.items()))
    if log_probs.requires_grad and not value.requires_grad:
        raise ConfigError(
            f"{key}={name}: {which} has no gradients, so that it would train nothing: compute it from the "
            "log-probabilities without detach() or torch.no_grad()",
            key=key,
            value=name,
        )


def probability_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return ``exp(log_probs - old_log_probs)``, with the difference limited to +-20 so that it stays finite."""
    return torch.exp((log_probs - old_log_probs).clamp(-20.0, 20.0))


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

    With ``clip_high`` above ``clip_low`` it is DAPO's clip-higher (Yu et al., 2025, arXiv:2503.14476).

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
    ratio = probability_ratio(log_probs, old_log_probs)
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


@register_policy_loss("cispo", clip_low=1.0, unused=("clip_ratio_c",))
def cispo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return ``-clip(ratio) * advantage * log_prob``, with no gradient through the clipped ratio.

    Every token keeps a gradient (MiniMax-M1, 2025, arXiv:2506.13585, equation 4). As in the paper, the ratio has no
    lower limit by default: ``clip_low=1``. ``dual_clip`` is not used.
    """
    ratio = probability_ratio(log_probs.detach(), old_log_probs)
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(-weight * advantages * log_probs, ratio, (weight != ratio).to(ratio.dtype))


@register_policy_loss("gpg", unused=("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"))
def gradient_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, **limits: float | None
) -> PolicyLoss:
    """Return ``-advantage * log_prob`` (GPG: Chu et al., 2025, arXiv:2504.02546). The limits are not used."""
    ratio = probability_ratio(log_probs.detach(), old_log_probs)
    return PolicyLoss(-advantages * log_probs, ratio, torch.zeros_like(ratio))


@register_policy_loss("gspo", whole_sequences=True, loss_agg_mode="seq-mean-token-mean", clip_low=3e-4, clip_high=4e-4)
def gspo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return the clipped surrogate of the length-normalized ratio of the response.

    The ratio is ``s = exp(mean over tokens of (log_probs - old_log_probs))``. Its gradient goes through each token's
    own log-probability: GSPO-token of Zheng et al., 2025, arXiv:2507.18071, which for one advantage per response has
    the gradient of GSPO. The default limits are the paper's: the ratio of a response is much closer to 1 than that of a
    token.

    Args: see ``clipped_policy_loss``; the mask has all tokens of the response.
    """
    mean = _mean_over_response(log_probs.detach() - old_log_probs, mask)[:, None]
    through_own_token = log_probs - log_probs.detach() + mean
    return clipped_policy_loss(
        through_own_token,
        torch.zeros_like(log_probs),
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


@register_policy_loss(
    "gmpo",
    whole_sequences=True,
    loss_agg_mode="seq-mean-token-mean",
    clip_low=0.4,
    clip_high=0.4,
    unused=("clip_ratio_c",),
)
def gmpo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return ``-advantage`` times the geometric mean of the response's token ratios, each clipped.

    ``log ratio`` is clipped to ``[-clip_low, clip_high]`` where that lowers the objective, token by token (Zhao et al.,
    2025, arXiv:2507.20673); the default limits are the paper's, 0.4 on both sides. ``dual_clip`` is not used.

    Args: see ``clipped_policy_loss``; the mask has all tokens of the response.
    """
    log_ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0)
    bounded = log_ratio.clamp(-clip_low, clip_high)
    lower = torch.where(advantages >= 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    weight = torch.exp(_mean_over_response(lower, mask))[:, None]
    clipped = (lower != log_ratio).to(log_ratio.dtype)
    return PolicyLoss(-advantages * weight, torch.exp(log_ratio), clipped)


def _mean_over_response(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``values`` over the tokens of every response, ``[rows]``."""
    return torch.where(mask != 0, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)
