"""Build Megatron's DistributedDataParallel, optimizer and learning-rate schedule from an ``OptimConfig``."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.utils import get_model_config
from torch import nn

from mcontroller.errors import ConfigError, before_changes
from parallel_state.errors import ParallelStateError
from parallel_state.releases import build_optimizer
from workers.config import OptimConfig
from workers.config.optim import DDP_DEFAULTS
from workers.model.transformer_config import checked_fields
from workers.train.router_losses import keeping_expert_bias, prepare_routers

ParameterGroups = Mapping[ParamKey, ParamGroupOverride]
"""Selects parameters, and maps them to settings that differ from the optimizer's; see ``standard_parameter_groups``."""


def optimizer_config(optim: OptimConfig, model: TransformerConfig) -> OptimizerConfig:
    """Return Megatron's configuration of the optimizer; needs no process group.

    Args:
        optim: the optimizer; ``optim.megatron`` has other fields of OptimizerConfig.
        model: Megatron's configuration of the model, of which the dtypes are read.

    Raises:
        ConfigError: a field of ``optim.megatron`` is unknown in the installed megatron-core, or has a value of another
            type; OptimizerConfig itself rejects the fields.
    """
    extra = checked_fields(OptimizerConfig, optim.megatron, "optim.megatron")
    if extra.get("optimizer_cpu_offload") and not torch.cuda.is_available():
        key = "optim.megatron.optimizer_cpu_offload"
        text = f"{key}=True moves the optimizer from a GPU to host memory, and CUDA is not available; leave it out"
        raise ConfigError(text, key=key, value=True)
    try:
        return OptimizerConfig(
            optimizer=optim.optimizer,
            lr=optim.lr,
            min_lr=optim.min_lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            clip_grad=optim.clip_grad,
            bf16=model.bf16,
            fp16=model.fp16,
            params_dtype=model.params_dtype,
            fp8_recipe=model.fp8_recipe if model.fp8 else None,
            use_distributed_optimizer=bool(optim.distributed_optimizer),
            overlap_param_gather=optim.overlap_param_gather,
            **extra,
        )
    except (AssertionError, RuntimeError, ValueError) as error:
        text = f"OptimizerConfig rejects optim.megatron: {error}"
        raise ConfigError(text, key="optim.megatron", value=optim.megatron) from error


def data_parallel_config(optim: OptimConfig, ddp: Mapping[str, Any]) -> DistributedDataParallelConfig:
    """Return Megatron's configuration of gradient buffers and their reduction; needs no process group.

    Gradients are summed in float32 unless ``ddp`` sets ``grad_reduce_in_fp32``.

    Args:
        optim: whether the optimizer is distributed, and what overlaps with computation.
        ddp: other fields of DistributedDataParallelConfig.

    Raises:
        ConfigError: a field is unknown in the installed megatron-core, or has a value of another type;
            DistributedDataParallelConfig itself rejects the fields.
    """
    fields = DDP_DEFAULTS | {
        "use_distributed_optimizer": bool(optim.distributed_optimizer),
        "overlap_grad_reduce": optim.overlap_grad_reduce,
        "overlap_param_gather": optim.overlap_param_gather,
    }
    extra = checked_fields(DistributedDataParallelConfig, ddp, "ddp")
    try:
        return DistributedDataParallelConfig(**(fields | extra))
    except (AssertionError, ValueError) as error:
        text = f"DistributedDataParallelConfig rejects ddp: {error}"
        raise ConfigError(text, key="ddp", value=dict(ddp)) from error


def wrap_for_training(
    chunks: Sequence[nn.Module], config: OptimConfig, pg: ProcessGroupCollection, ddp: Mapping[str, Any] | None = None
) -> list[DistributedDataParallel]:
    """Wrap the model chunks of this rank in Megatron's DistributedDataParallel.

    Gradients are sums over all tokens of the mini-batch on all data-parallel ranks; ``workers.train.trainer``
    divides them by what the loss counts. Router losses are weighted accordingly.

    Args:
        chunks: this rank's model chunks.
        config: whether the optimizer is distributed, and what overlaps with computation.
        pg: the groups of the layout.
        ddp: other fields of Megatron's DistributedDataParallelConfig.

    Raises:
        ConfigError: a router of another class than Megatron's has losses (see ``prepare_routers``), or a field of
            ``ddp`` cannot be used (see ``data_parallel_config``), or Megatron-Core leaves out gradients of multi-latent
            attention in this layout.
    """
    model_config = get_model_config(chunks[0])
    model_config.calculate_per_token_loss = True
    prepare_routers(chunks)
    _check_latent_attention(chunks)
    wrapped = [
        DistributedDataParallel(
            model_config,
            data_parallel_config(config, ddp or {}),  # the class changes it
            chunk,
            disable_bucketing=index > 0,
            pg_collection=pg,
        )
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        _count_padding_of_buckets(chunk)
    if config.overlap_grad_reduce:
        interleaved = len(wrapped) > 1
        model_config.no_sync_func = [chunk.no_sync for chunk in wrapped] if interleaved else wrapped[0].no_sync
        if interleaved:
            model_config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
        if interleaved and config.overlap_param_gather:
            model_config.param_sync_func = [chunk.start_param_sync for chunk in wrapped]
    model_config.finalize_model_grads_func = _sum_gradients
    return wrapped


def _sum_gradients(chunks: list[nn.Module], num_tokens: object = None, *args: Any, **kwargs: Any) -> None:
    """Finalize gradients as Megatron does, without the division by its count of tokens, which is an integer."""
    with keeping_expert_bias(get_model_config(chunks[0])):
        finalize_model_grads(chunks, None, *args, **kwargs)


def _count_padding_of_buckets(chunk: DistributedDataParallel) -> None:
    """Count the padding of buckets as theirs, so that a checkpoint of the distributed optimizer is not shifted.

    Megatron joins the buckets of a buffer without the padding at their ends, but cuts the result at offsets that count
    it. All parameters after a padded bucket would be saved with an offset, and load as other weights.
    """
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = buffer.numel


def standard_parameter_groups(model: Sequence[nn.Module], config: OptimConfig) -> ParameterGroups:
    """Return Megatron's own settings of single parameters.

    Biases and other parameters with one dim have no weight decay; ``optim.megatron.decoupled_lr`` is the learning rate
    of the input and the output layer.

    Args:
        model: this rank's model chunks.
        config: the optimizer.

    Examples:
        >>> standard = standard_parameter_groups(model, config)
        >>> {**standard, ParamKey(name="*router.weight"): ParamGroupOverride(max_lr=1e-6, min_lr=0.0)}
    """
    return get_standard_config_overrides(optimizer_config(config, get_model_config(model[0])))


def make_optimizer(
    model: Sequence[DistributedDataParallel],
    config: OptimConfig,
    pg: ProcessGroupCollection,
    groups: ParameterGroups | None = None,
) -> MegatronOptimizer:
    """Build Megatron's optimizer over the parameters of ``model``.

    Args:
        model: this rank's chunks, inside DistributedDataParallel.
        config: the optimizer and its settings.
        pg: the groups of the layout.
        groups: settings of single parameters; None for ``standard_parameter_groups``.

    Raises:
        ConfigError: the installed packages cannot build the optimizer, or two entries of ``groups`` contradict each
            other.
    """
    model_config = get_model_config(model[0])
    fields = optimizer_config(config, model_config)
    if groups is None:
        groups = standard_parameter_groups(model, config)
    try:
        optimizer = build_optimizer(fields, list(model), pg, dict(groups))
    except (AssertionError, ImportError, ParallelStateError, ValueError) as error:
        text = f"megatron-core cannot build optim.optimizer={config.optimizer!r}: {error}"
        raise ConfigError(text, key="optim.optimizer", value=config.optimizer) from error
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.init_state_fn is None:
            part.init_state_fn = _init_momentum
    model_config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _init_momentum(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Create the state of SGD, which Megatron leaves out; a checkpoint is loaded into it."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def make_scheduler(optimizer: MegatronOptimizer, config: OptimConfig) -> OptimizerParamScheduler:
    """Build Megatron's learning-rate schedule; it takes one step for each step of the optimizer."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.warmup_init_lr if config.warmup_steps else config.lr,
        max_lr=config.lr,
        min_lr=config.min_lr,
        **_shape_of_schedule(config),
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=config.wsd_decay_steps or None,
        lr_wsd_decay_style="linear",
    )


def gather_parameters(model: Sequence[DistributedDataParallel], config: OptimConfig) -> None:
    """Gather parameters now if the distributed optimizer would gather them in the next forward pass."""
    if config.overlap_param_gather:
        for chunk in model:
            chunk.start_param_sync(force_sync=True)


def check_not_ended(phase: str, ended: Collection[str]) -> None:
    """Raise ConfigError if the optimizer of a phase of training was replaced by another phase's."""
    if phase not in ended:
        return
    with before_changes():
        raise ConfigError(
            f"the phase {phase!r} cannot go on: its moments, float32 weights and schedule were replaced when training "
            "went on in another phase, whose optimizer has other settings. Finish one phase before the other, or leave "
            "sft_optim out: both then train with one optimizer",
            key="sft_optim",
            value=phase,
        )


def check_schedule_unit(base: type, worker: Any, scheduler: OptimizerParamScheduler, config: OptimConfig) -> None:
    """Check the unit that a worker class declares for the schedule of its own ``build_optimizer``.

    Args:
        base: the class whose ``build_optimizer`` returns the schedule of ``config``.
        worker: the class of the worker.
        scheduler: what its ``build_optimizer`` returned.
        config: the configuration of the optimizer.

    Raises:
        ConfigError: the unit is unknown; or the schedule differs from ``config``, and neither the class that overrides
            ``build_optimizer`` nor one below it declares a unit.
    """
    name, unit = worker.__name__, worker.schedule_unit
    if unit not in ("steps", "samples"):
        raise ConfigError(f"{name}.schedule_unit is {unit!r}; it must be 'steps' or 'samples'", key="schedule_unit")
    below = worker.__mro__[: worker.__mro__.index(base)]
    overriding = [index for index, cls in enumerate(below) if "build_optimizer" in vars(cls)]
    if not overriding or any("schedule_unit" in vars(cls) for cls in below[: overriding[0] + 1]):
        return
    for field, configured in _shape_of_schedule(config).items():
        built = getattr(scheduler, field)
        if built != configured:
            raise ConfigError(
                f"the schedule of {name}.build_optimizer has {field} {built!r}, and optim has {configured!r}: "
                f'declare what it counts in the class {name}: schedule_unit = "samples", as in Megatron-LM, or "steps"',
                key="schedule_unit",
                value=unit,
            )


def _shape_of_schedule(config: OptimConfig) -> dict[str, Any]:
    return {
        "lr_warmup_steps": config.warmup_steps,
        "lr_decay_steps": max(config.total_steps, config.warmup_steps + 1),
        "lr_decay_style": config.decay_style,
    }


class Step(NamedTuple):
    """The result of one call of the optimizer.

    Attributes:
        made: whether the weights changed.
        grad_norm: norm of the gradients before clipping.
        overflow: whether float16 overflowed. That is no error: the loss scale falls, and the step is skipped.
        lr: its learning rate.
    """

    made: bool
    grad_norm: float
    overflow: bool = False
    lr: float = 0.0


def guarded_step(optimizer: MegatronOptimizer) -> Step:
    """Make one step of Megatron's (chained) optimizer if the gradients are finite.

    Megatron would clip by a norm of NaN and write NaN into every weight, so a norm that is not finite ends its step
    before any weight changes. All ranks that share the model compute the same norm, so all of them end the step.

    Returns:
        Whether the step was made, the norm, and whether float16 overflowed.
    """
    get_grad_norm = optimizer.get_grad_norm

    def finite_norm() -> float:
        norm = float(get_grad_norm())
        if not math.isfinite(norm):
            raise _NotFinite(norm)
        return norm

    optimizer.get_grad_norm = finite_norm
    try:
        made, norm, _ = optimizer.step()
    except _NotFinite as not_finite:
        return Step(made=False, grad_norm=not_finite.norm)
    finally:
        del optimizer.get_grad_norm  # the method of the class is visible again
    return Step(made=False, grad_norm=math.inf, overflow=True) if norm is None else Step(bool(made), norm)


class _NotFinite(Exception):
    def __init__(self, norm: float) -> None:
        super().__init__(norm)
        self.norm = norm


def _check_latent_attention(chunks: Sequence[nn.Module]) -> None:
    """Check that a model with multi-latent attention can be trained in its layout.

    All heads share one rotary part of the keys. Megatron-Core 0.16 adds its gradients over the heads of all ranks only
    under sequence parallelism with down-projections that tp does not divide, as in its spec for Transformer Engine. In
    other layouts with tp, each rank would train the part with the gradients of its own heads.

    Raises:
        ConfigError: a layer is built in another way.
    """
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if not isinstance(module, MultiLatentAttention) or module.tp_group.size() == 1:
                continue
            divided = any(
                "down_proj." in parameter and getattr(weight, "tensor_model_parallel", False)
                for parameter, weight in module.named_parameters()
            )
            if module.config.sequence_parallel and not divided:
                continue
            raise ConfigError(
                f"{name} has multi-latent attention with tp={module.tp_group.size()}, which can be trained only with "
                "sequence_parallel=true and down-projections that tp does not divide (Transformer Engine's spec, or "
                "Linear of megatron.core.post_training.modelopt.layers): Megatron-Core would leave out gradients of "
                "other ranks' heads",
                key="parallel.tp",
                value=module.tp_group.size(),
            )
