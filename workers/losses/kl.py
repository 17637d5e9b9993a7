"""Estimators of the KL divergence between policy and reference, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mcontroller.config.registry import Registry
from mcontroller.errors import ConfigError
from parallel_state.lazy import Lazy
from workers.losses.policy import check_of_tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Lazy("torch")

KLEstimator = Callable[["Tensor"], "Tensor"]
"""Maps ``log policy - log reference`` of sampled tokens to an estimate of KL(policy || reference) of each token."""

KL_ESTIMATORS: Registry[KLEstimator] = Registry("KL estimator", key="kl_penalty")
"""KL estimators by the name that ``algorithm.kl_penalty`` and ``ActorConfig.kl_loss_type`` take.

k1 is unbiased; k2 is biased with less variance; k3 is unbiased and never negative (Schulman, "Approximating KL
divergence", 2020). As a loss, k2 has the gradient of the divergence in expectation, k1 has none, and that of k3 is
biased: k1+ and k3+ have the values of k1 and k3 and the gradient of k2.
"""

F = TypeVar("F", bound=KLEstimator)


def register_kl_estimator(name: str) -> Callable[[F], F]:
    """Return a decorator that registers a KL estimator under ``name``.

    Raises:
        ConfigError: another KL estimator is registered under this name.
    """
    return KL_ESTIMATORS.register(name)


@register_kl_estimator("k1")
def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


@register_kl_estimator("k2")
def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


@register_kl_estimator("k3")
def _k3(log_ratio: Tensor) -> Tensor:
    # the limits keep the estimate finite if the policy or the reference almost excludes the token
    back = (-log_ratio).clamp(-20.0, 20.0)
    return torch.expm1(back) - back


@register_kl_estimator("abs")
def _abs(log_ratio: Tensor) -> Tensor:
    return torch.abs(log_ratio)


@register_kl_estimator("k1+")
def _k1_with_gradient_of_k2(log_ratio: Tensor) -> Tensor:
    return _with_gradient_of_k2(_k1(log_ratio), log_ratio)


@register_kl_estimator("k3+")
def _k3_with_gradient_of_k2(log_ratio: Tensor) -> Tensor:
    return _with_gradient_of_k2(_k3(log_ratio), log_ratio)


def _with_gradient_of_k2(value: Tensor, log_ratio: Tensor) -> Tensor:
    through = _k2(log_ratio)
    return value.detach() + (through - through.detach())


def check_kl_loss(name: str) -> None:
    """Check that an estimator can be a loss, which k1 cannot.

    Its derivative by the log ratio is the same everywhere, and the mean of the gradient of ``log_probs`` over tokens of
    the policy is 0.

    Raises:
        ConfigError: it is k1, or no estimator has this name.
    """
    KL_ESTIMATORS.get_or_raise(name, key="kl_loss_type")
    if name == "k1":
        raise ConfigError(
            "kl_loss_type is 'k1', which has no effect as a loss: its gradient is zero in expectation. Use k1+ (the "
            "value of k1, the gradient of k2), k2, k3 or k3+; in the reward, algorithm.kl_penalty=k1 is right",
            key="kl_loss_type",
            value=name,
        )


def estimate_kl(
    log_probs: Tensor, ref_log_probs: Tensor, kl_penalty: str = "k1", clip: float | None = None, key: str = "kl_penalty"
) -> Tensor:
    """Return the estimate of KL(policy || reference) of every token, in the shape of ``log_probs``.

    Args:
        log_probs: natural logarithms under the policy.
        ref_log_probs: the same under the reference.
        kl_penalty: a name in ``KL_ESTIMATORS``.
        clip: limit of the estimate on both sides of 0, beyond which it has no gradient. None: no limit.
        key: of the configuration that has the name, for errors.

    Raises:
        ConfigError: no estimator has this name, or it does not return a value of every token, with gradients if
            ``log_probs`` has them.
    """
    estimate = KL_ESTIMATORS.get_or_raise(kl_penalty, key=key)(log_probs - ref_log_probs)
    check_of_tokens(key, kl_penalty, {"the estimate": estimate}, log_probs)
    return estimate if clip is None else estimate.clamp(-clip, clip)
