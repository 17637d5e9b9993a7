"""OptimConfig: AdamW, its learning-rate schedule, and the treatment of gradients before a step."""

from __future__ import annotations

from dataclasses import dataclass

from mcontroller.config.checks import check_above, check_at_least, check_between, check_one_of
from mcontroller.config.fields import strict_fields
from mcontroller.errors import ConfigError

__all__ = ["DECAY_STYLES", "OptimConfig"]

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


@strict_fields
@dataclass(frozen=True, slots=True)
class OptimConfig:
    """AdamW and its learning rate, which rises over the warm-up from 0 to ``lr`` and then falls to ``min_lr``."""

    lr: float = 1e-5
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at total_steps and after it."""
    weight_decay: float = 0.01
    """Decoupled weight decay of AdamW, per step and relative to the learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's first and second moments, each 0 to 1."""
    eps: float = 1e-8
    """Term added to Adam's denominator."""
    clip_grad: float = 1.0
    """Largest norm of the gradients, over all parameters; larger ones are scaled down. 0: no clipping."""
    warmup_steps: int = 0
    """[optimizer steps] Length of the linear warm-up."""
    total_steps: int = 0
    """[optimizer steps] Step at which the decay ends; unused if decay_style is constant."""
    decay_style: str = "constant"
    """Shape of the decay: constant, linear, cosine, inverse-square-root or WSD (warm-up, stable, decay)."""
    wsd_decay_steps: int = 0
    """[optimizer steps] Length of the decay at the end of a WSD schedule."""
    distributed_optimizer: bool = False
    """Shard the optimizer's state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over the data-parallel ranks during the backward pass."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward pass; needs the two fields above."""
    on_nonfinite: str = "raise"
    """Reaction to NaN or Inf in the gradients: raise (stop the run) or skip (omit the step and count it)."""

    def __post_init__(self) -> None:
        check_at_least("optim.lr", self.lr, self.min_lr)
        check_at_least("optim.min_lr", self.min_lr, 0.0)
        check_at_least("optim.weight_decay", self.weight_decay, 0.0)
        check_at_least("optim.clip_grad", self.clip_grad, 0.0)
        check_above("optim.eps", self.eps, 0.0)
        for beta in self.betas:
            check_between("optim.betas", beta, 0.0, 1.0)
        check_at_least("optim.warmup_steps", self.warmup_steps, 0)
        check_one_of("optim.decay_style", self.decay_style, DECAY_STYLES)
        check_one_of("optim.on_nonfinite", self.on_nonfinite, ("raise", "skip"))
        if self.decay_style != "constant" and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"optim.total_steps is {self.total_steps}: the decay of decay_style={self.decay_style} ends there, so "
                f"it must be more than warmup_steps={self.warmup_steps}",
                key="optim.total_steps",
                value=self.total_steps,
            )
        if self.decay_style == "WSD":
            check_between("optim.wsd_decay_steps", self.wsd_decay_steps, 1, self.total_steps - self.warmup_steps)
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ConfigError(
                "optim.overlap_param_gather needs optim.distributed_optimizer and optim.overlap_grad_reduce",
                key="optim.overlap_param_gather",
                value=True,
            )
