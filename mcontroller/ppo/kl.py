"""The KL divergence between policy and reference: estimators by name, the penalty in the reward, and its weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from mcontroller.config.checks import check_above, check_at_least
from mcontroller.config.fields import check_unused, strict_fields
from mcontroller.config.registry import Registry
from mcontroller.errors import ConfigError, DataError
from parallel_state.lazy import Lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mcontroller.data.protocol import DataProto
    from mcontroller.ppo.data import columns
else:
    torch = Lazy("torch")
    DataProto, columns = Lazy("mcontroller.data.protocol", "DataProto"), Lazy("mcontroller.ppo.data", "columns")

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
    """Check that an estimator can be a loss: its gradient is not zero in expectation over the policy's tokens.

    It is if the derivative by the log ratio is the same everywhere, because the mean of the gradient of
    ``log_probs`` over tokens of the policy is 0.

    Raises:
        ConfigError: it is, or no estimator has this name.
    """
    estimator = KL_ESTIMATORS.get_or_raise(name, key="kl_loss_type")
    if name in ("k1+", "k2", "k3", "k3+", "abs"):  # known without torch
        return
    with torch.enable_grad():
        log_ratio = torch.tensor([[-1.0, 0.0, 1.0]], requires_grad=True)
        estimate = estimator(log_ratio)
        slopes = torch.autograd.grad(estimate.sum(), log_ratio)[0][0].tolist() if estimate.requires_grad else [0.0]
    if min(slopes) == max(slopes):
        raise ConfigError(
            f"kl_loss_type is {name!r}, which has no effect as a loss: its derivative is {slopes[0]:g} for every "
            "token, so its gradient is zero in expectation. Use k1+ (the value of k1, the gradient of k2), k2, k3 or "
            f"k3+; in the reward, algorithm.kl_penalty={name} is right",
            key="kl_loss_type",
            value=name,
        )


def estimate_kl(log_probs: Tensor, ref_log_probs: Tensor, kl_penalty: str = "k1", clip: float | None = None) -> Tensor:
    """Return the estimate of KL(policy || reference) of every token, in the shape of ``log_probs``.

    Args:
        log_probs: natural logarithms under the policy.
        ref_log_probs: the same under the reference.
        kl_penalty: a name in ``KL_ESTIMATORS``.
        clip: limit of the estimate on both sides of 0, beyond which it has no gradient. None: no limit.

    Raises:
        ConfigError: no estimator has this name.
    """
    estimate = KL_ESTIMATORS.get_or_raise(kl_penalty)(log_probs - ref_log_probs)
    return estimate if clip is None else estimate.clamp(-clip, clip)


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController | None, kl_penalty: str = "k1", clip: float | None = None
) -> tuple[DataProto, dict[str, float]]:
    """Return the batch with ``token_level_rewards`` = scores - weight * KL, and the mean KL per token as a metric.

    Args:
        data: ``token_level_scores``, ``old_log_probs``, ``ref_log_prob``, ``response_mask`` ``[rows, response]``.
        kl_ctrl: supplies the weight, and is updated with the KL of this batch. None: no penalty, so that the rewards
            are the scores.
        kl_penalty: a name in ``KL_ESTIMATORS``.
        clip: limit of the estimate of a token; see ``estimate_kl``.

    Raises:
        ConfigError: no estimator has this name.
        DataError: a column is missing, or the KL of a token is not finite.
    """
    if kl_ctrl is None:
        return data.with_tensors({"token_level_rewards": columns(data, "token_level_scores")[0]}), {}
    names = ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask")
    scores, log_probs, reference, mask = columns(data, *names)
    kept = mask.bool()
    estimate = torch.where(kept, estimate_kl(log_probs, reference, kl_penalty, clip), 0.0)
    weight = kl_ctrl.value
    rewards = torch.where(kept, scores, 0.0) - weight * estimate
    mean = float(estimate.sum() / kept.sum().clamp(min=1))
    if not math.isfinite(mean):  # an adaptive weight would never be a number again
        wrong = int((~estimate.isfinite()).sum())
        raise DataError(
            f"the KL penalty is not finite for {wrong} of {int(kept.sum())} tokens: old_log_probs or ref_log_prob are "
            "not finite there, or differ too much for algorithm.kl_penalty: set algorithm.kl_clip",
            tokens=wrong,
            kl_penalty=kl_penalty,
        )
    kl_ctrl.update(mean, n_steps=len(data))
    metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": weight}
    return data.union(DataProto.from_dict({"token_level_rewards": rewards})), metrics


class KLController(Protocol):
    """The weight of the KL penalty, updated after every batch."""

    value: float
    """The weight."""

    def update(self, current_kl: float, n_steps: int) -> None:
        """Update the weight with the mean KL per token of the last batch, which has ``n_steps`` samples."""

    def resume(self, value: float) -> None:
        """Continue from the weight of a saved run."""


KL_CONTROLLERS: Registry[Callable[[KLControlConfig], KLController]] = Registry(
    "KL controller", key="algorithm.kl_ctrl.type"
)
"""Controllers by the name that ``algorithm.kl_ctrl.type`` takes; ``KL_CONTROLLERS.register`` adds one."""


@strict_fields
@dataclass(frozen=True, slots=True)
class KLControlConfig:
    """The weight of the KL penalty in the reward."""

    type: str = "fixed"
    """Name of the controller: fixed, or adaptive towards target_kl."""
    kl_coef: float = 0.001
    """Weight at the start."""
    target_kl: float = 0.1
    """[nats per token] KL that an adaptive controller steers towards."""
    horizon: int = 10000
    """[samples] Samples after which an adaptive weight has changed by a factor of at most about 1.2."""

    def __post_init__(self) -> None:
        KL_CONTROLLERS.get_or_raise(self.type)
        check_at_least("algorithm.kl_ctrl.kl_coef", self.kl_coef, 0.0)
        check_at_least("algorithm.kl_ctrl.horizon", self.horizon, 1)
        if self.type == "adaptive":
            check_above("algorithm.kl_ctrl.target_kl", self.target_kl, 0.0)
        if self.type == "fixed":
            reason = "with algorithm.kl_ctrl.type=fixed: set type=adaptive"
            check_unused(self, ("target_kl", "horizon"), "algorithm.kl_ctrl.", reason)


@KL_CONTROLLERS.register("fixed")
class FixedKLController:
    """A constant weight."""

    def __init__(self, config: KLControlConfig) -> None:
        self.value = config.kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Keep the weight."""

    def resume(self, value: float) -> None:
        """Keep the configured weight, which may differ from the saved one."""


@KL_CONTROLLERS.register("adaptive")
class AdaptiveKLController:
    """A weight that rises while the KL is above ``target_kl`` and falls while it is below.

    ``value *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon`` after ``n`` samples (Ziegler et al., 2019,
    arXiv:1909.08593, section 2.2).
    """

    def __init__(self, config: KLControlConfig) -> None:
        self.value = config.kl_coef
        self.target = config.target_kl
        self.horizon = config.horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the weight to the KL per token of ``n_steps`` new samples."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon

    def resume(self, value: float) -> None:
        """Continue from the weight of a saved run."""
        self.value = value


def make_kl_controller(config: KLControlConfig) -> KLController:
    """Return the controller that ``config.type`` names."""
    return KL_CONTROLLERS[config.type](config)
