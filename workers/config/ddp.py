"""Checks of ``ddp``, the fields of Megatron's DistributedDataParallelConfig in the configuration of a role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcontroller.errors import ConfigError
from workers.config.optim import OptimConfig

__all__ = ["DDP_SET_ELSEWHERE", "check_ddp"]

DDP_SET_ELSEWHERE = {
    "use_distributed_optimizer": "optim.distributed_optimizer",
    "overlap_grad_reduce": "optim.overlap_grad_reduce",
    "overlap_param_gather": "optim.overlap_param_gather",
}
"""Fields of DistributedDataParallelConfig that other keys of a role's configuration set, and these keys."""

_FSDP = "Megatron's FSDP keeps weights as DTensors, which checkpoints, resharding and offload cannot move"
_FP8_WEIGHTS = "weights are stored in model.dtype, from which they are copied to other layouts and exported"
_NOT_FINITE = "optim.on_nonfinite checks the gradients of every step"
# Fields, the only supported value, and the reason.
_NOT_COMPUTED: dict[str, tuple[object, str]] = {
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
    "data_parallel_sharding_strategy": ("no_shard", _FSDP),
    "outer_dp_sharding_strategy": ("no_shard", _FSDP),
    "gradient_reduce_div_fusion": (True, _FSDP),
    "suggested_communication_unit_size": (None, _FSDP),
    "preserve_fp32_weights": (True, _FSDP),
}
_FSDP_PREFIXES = ("fsdp_", "megatron_fsdp_")
# Fields that have an effect only if a switch is on.
_NEEDS: dict[str, str] = {
    "bucket_size": "overlap_grad_reduce",
    "num_buckets": "overlap_grad_reduce",
    "align_param_gather": "overlap_param_gather",
    "pad_buckets_for_high_nccl_busbw": "distributed_optimizer",
    "reduce_scatter_with_fp32_accumulation": "distributed_optimizer",
}


def check_ddp(ddp: Mapping[str, Any], optim: OptimConfig) -> None:
    """Check the fields that need neither megatron-core nor a process group.

    Args:
        ddp: fields of DistributedDataParallelConfig.
        optim: the optimizer that uses the gradients.

    Raises:
        ConfigError: a field is set by another key, or would not be computed; ``key`` names it.
    """
    for name, value in ddp.items():
        key = f"ddp.{name}"
        if name in DDP_SET_ELSEWHERE:
            raise ConfigError(f"{key} follows from {DDP_SET_ELSEWHERE[name]}: set it there", key=key, value=value)
        neutral, why = _NOT_COMPUTED.get(name, (value, ""))
        if name.startswith(_FSDP_PREFIXES):
            neutral, why = None, _FSDP
        if value not in (None, neutral):
            raise ConfigError(f"{key}={value!r} is not supported: {why}", key=key, value=value)
        switch = _NEEDS.get(name)
        if switch is not None and value and not getattr(optim, switch):
            text = f"{key}={value!r} has no effect without optim.{switch}: set optim.{switch}=true, or leave it out"
            raise ConfigError(text, key=key, value=value)
