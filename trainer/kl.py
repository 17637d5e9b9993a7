"""The KL divergence between policy and reference: estimators by name, the penalty in the reward, and its weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mcontroller.config.checks import check_above, check_at_least
from mcontroller.config.fields import strict_fields, unused_if
from mcontroller.config.registry import Registry
from mcontroller.errors import DataError
from parallel_state.lazy import Lazy
from workers.losses.kl import estimate_kl

if TYPE_CHECKING:
    import torch

    from mcontroller.data.batch import DataProto
    from trainer.columns import columns
else:
    torch = Lazy("torch")
    DataProto, columns = Lazy("mcontroller.data.batch", "DataProto"), Lazy("trainer.columns", "columns")

KL_CONTROLLERS: Registry[Callable[[KLControlConfig], KLController]] = Registry(
    "KL controller", key="algorithm.kl_ctrl.type"
)
"""Controllers by the name that ``algorithm.kl_ctrl.type`` takes; ``KL_CONTROLLERS.register`` adds one."""


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


@strict_fields
@dataclass(frozen=True, slots=True)
class KLControlConfig:
    """The weight of the KL penalty in the reward."""

    type: str = "fixed"
    """Name of the controller: fixed, or adaptive towards target_kl."""
    kl_coef: float = 0.001
    """Weight at the start."""
    target_kl: float = unused_if(0.1, type="fixed")
    """[nats per token] KL that an adaptive controller steers towards."""
    horizon: int = unused_if(10000, type="fixed")
    """[samples] Samples after which an adaptive weight has changed by a factor of at most about 1.2."""

    def __post_init__(self) -> None:
        KL_CONTROLLERS.get_or_raise(self.type)
        check_at_least("algorithm.kl_ctrl.kl_coef", self.kl_coef, 0.0)
        check_at_least("algorithm.kl_ctrl.horizon", self.horizon, 1)
        if self.type == "adaptive":
            check_above("algorithm.kl_ctrl.target_kl", self.target_kl, 0.0)


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
