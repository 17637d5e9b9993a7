"""OptimConfig: the optimizer, its schedule, and the treatment of gradients; checks of its fields and of ``ddp``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mcontroller.config.checks import check_above, check_at_least, check_between, check_one_of
from mcontroller.config.fields import strict_fields, unused_if, used_if
from mcontroller.errors import ConfigError

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")

# Fields of Megatron's OptimizerConfig that other keys of a role's configuration set, and these keys.
_SET_ELSEWHERE = {
    "optimizer": "optim.optimizer",
    "lr": "optim.lr",
    "min_lr": "optim.min_lr",
    "weight_decay": "optim.weight_decay",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_eps": "optim.eps",
    "clip_grad": "optim.clip_grad",
    "use_distributed_optimizer": "optim.distributed_optimizer",
    "overlap_param_gather": "optim.overlap_param_gather",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "params_dtype": "model.dtype",
    "fp8_recipe": "model.transformer.fp8_recipe",
    "reuse_grad_buf_for_mxfp8_param_ag": "ddp.reuse_grad_buf_for_mxfp8_param_ag",
}
_TIMERS = "it belongs to the timers of Megatron-LM's training loop"
# Fields of OptimizerConfig, the only supported value, and the reason.
_NOT_COMPUTED: dict[str, tuple[object, str]] = {
    "overlap_param_gather_with_optimizer_step": (False, "it needs Megatron-LM's own training loop"),
    "use_layer_wise_distributed_optimizer": (False, "it does not use the buffers of optim.distributed_optimizer"),
    "grad_norm_skip_threshold": (float("inf"), "the skipped step would be reported as NaN or Inf; use optim.clip_grad"),
    "log_num_zeros_in_grad": (False, "no metric reports the number"),
    "optimizer_cuda_graph": (False, "the norm of every step is read on the host, for optim.on_nonfinite"),
    "barrier_with_L1_time": (False, _TIMERS),
    "timers": (None, _TIMERS),
}
_UNSUPPORTED = {
    "adaptive_muon": "its first step fails with emerging-optimizers 0.3",
    "dist_muon": "it does not use the buffers of optim.distributed_optimizer; use muon",
    "soap": "megatron-core cannot save its state in a checkpoint",
}
# Fields of DistributedDataParallelConfig that other keys of a role's configuration set, and these keys.
_DDP_SET_ELSEWHERE = {
    "use_distributed_optimizer": "optim.distributed_optimizer",
    "overlap_grad_reduce": "optim.overlap_grad_reduce",
    "overlap_param_gather": "optim.overlap_param_gather",
}
DDP_DEFAULTS: dict[str, Any] = {"grad_reduce_in_fp32": True, "average_in_collective": False}
"""Fields of DistributedDataParallelConfig whose defaults differ from Megatron's."""
_FSDP = (
    "Megatron's FSDP keeps weights as DTensors, which checkpoints, transfers and offload of this package cannot move"
)
_FP8_WEIGHTS = "weights are stored in model.dtype, from which they are resharded and exported"
_NOT_FINITE = "optim.on_nonfinite checks the gradients of every step"
_DDP_NOT_COMPUTED: dict[str, tuple[object, str]] = {
    "average_in_collective": (False, "gradients are sums over tokens, divided by their number after the reduction"),
    "num_distributed_optimizer_instances": (1, "no process groups are created for it"),
    "check_for_nan_in_grad": (False, _NOT_FINITE),
    "check_for_large_grads": (False, _NOT_FINITE),
    "delay_wgrad_compute": (False, "its schedule needs Megatron-LM's own forward step"),
    "fp8_param_gather": (False, _FP8_WEIGHTS),
    "fp4_param_gather": (False, _FP8_WEIGHTS),
    "reuse_grad_buf_for_mxfp8_param_ag": (False, _FP8_WEIGHTS),
    "keep_fp8_transpose_cache": (False, _FP8_WEIGHTS),
    "use_megatron_fsdp": (False, _FSDP),
    "use_custom_fsdp": (False, _FSDP),
}


@strict_fields
@dataclass(frozen=True, slots=True)
class OptimConfig:
    """The optimizer and its learning rate, which rises over the warm-up to ``lr`` and then falls to ``min_lr``.

    The optimizer is AdamW unless ``optimizer`` is set.
    """

    lr: float = 1e-5
    """Peak learning rate."""
    min_lr: float = unused_if(0.0, decay_style="constant")
    """Learning rate at total_steps and after it."""
    weight_decay: float = 0.01
    """Weight decay, per step and relative to the learning rate; AdamW's is decoupled from the gradient."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's first and second moments, each 0 to 1."""
    eps: float = 1e-8
    """Term added to Adam's denominator."""
    clip_grad: float = 1.0
    """Largest norm of the gradients, over all parameters; larger ones are scaled down. 0: no clipping."""
    warmup_steps: int = 0
    """[optimizer steps] Length of the linear warm-up."""
    warmup_init_lr: float = unused_if(0.0, warmup_steps=0)
    """Learning rate at the start of the warm-up, at most lr."""
    total_steps: int = unused_if(0, decay_style="constant")
    """[optimizer steps] Step at which the decay ends. Not with decay_style=constant."""
    decay_style: str = "constant"
    """Shape of the decay: constant, linear, cosine, inverse-square-root or WSD (warm-up, stable, decay)."""
    wsd_decay_steps: int = used_if(0, decay_style="WSD")
    """[optimizer steps] Length of the decay at the end of a WSD schedule."""
    distributed_optimizer: bool | None = None
    """Shard the optimizer's state over the data-parallel ranks. None: on a GPU, of adam, with several such ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over the data-parallel ranks during the backward pass."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward pass; needs the two fields above."""
    on_nonfinite: str = "raise"
    """Reaction to NaN or Inf in the gradients: raise (stop the run) or skip (omit the step and count it)."""
    optimizer: str = "adam"
    """Name of the optimizer in Megatron-Core: adam, sgd, or muon or lion of the package emerging-optimizers."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Other fields of Megatron's OptimizerConfig, under Megatron's names."""

    def __post_init__(self) -> None:
        check_at_least("optim.lr", self.lr, float(self.min_lr))
        check_at_least("optim.min_lr", self.min_lr, 0.0)
        check_at_least("optim.weight_decay", self.weight_decay, 0.0)
        check_at_least("optim.clip_grad", self.clip_grad, 0.0)
        check_above("optim.eps", self.eps, 0.0)
        for beta in self.betas:
            check_between("optim.betas", beta, 0.0, 1.0)
        check_at_least("optim.warmup_steps", self.warmup_steps, 0)
        check_between("optim.warmup_init_lr", self.warmup_init_lr, 0.0, self.lr)
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
        _check_megatron(self)

    def resolved(self, replicas: int, *, on_gpu: bool) -> OptimConfig:
        """Return this configuration with ``distributed_optimizer`` decided.

        Args:
            replicas: ranks that have the same weights: dp x cp.
            on_gpu: whether the model is on a GPU.
        """
        if self.distributed_optimizer is not None:
            return self
        return replace(self, distributed_optimizer=on_gpu and replicas > 1 and self.optimizer == "adam")


def _check_megatron(optim: OptimConfig) -> None:
    """Check ``optim.megatron`` as far as no model and no megatron-core is needed."""
    if optim.optimizer in _UNSUPPORTED:
        text = f"optim.optimizer={optim.optimizer!r} is not supported: {_UNSUPPORTED[optim.optimizer]}"
        raise ConfigError(text, key="optim.optimizer", value=optim.optimizer)
    if optim.optimizer == "sgd" and (tuple(optim.betas), optim.eps) != (OptimConfig().betas, OptimConfig().eps):
        text = "optim.betas and optim.eps are Adam's, and optim.optimizer is 'sgd': use optim.megatron.sgd_momentum"
        raise ConfigError(text, key="optim.betas", value=optim.betas)
    if optim.optimizer != "adam" and optim.distributed_optimizer:
        raise ConfigError(
            f"optim.distributed_optimizer shards the state of adam only, and optim.optimizer is {optim.optimizer!r}",
            key="optim.distributed_optimizer",
            value=True,
        )
    _check_fields("optim.megatron", optim.megatron, _SET_ELSEWHERE, _NOT_COMPUTED)


def check_ddp(ddp: Mapping[str, Any]) -> None:
    """Check the fields of DistributedDataParallelConfig that need neither megatron-core nor a process group.

    Raises:
        ConfigError: a field is set by another key, or would not be computed; ``key`` names it.
    """
    _check_fields("ddp", ddp, _DDP_SET_ELSEWHERE, _DDP_NOT_COMPUTED)


def _check_fields(
    at: str,
    fields: Mapping[str, Any],
    set_elsewhere: Mapping[str, str],
    not_computed: Mapping[str, tuple[object, str]],
) -> None:
    for name, value in fields.items():
        key = f"{at}.{name}"
        if name in set_elsewhere:
            raise ConfigError(f"{key} follows from {set_elsewhere[name]}: set it there", key=key, value=value)
        neutral, why = not_computed.get(name, (value, ""))
        if value not in (None, neutral):
            raise ConfigError(f"{key}={value!r} is not supported: {why}", key=key, value=value)
