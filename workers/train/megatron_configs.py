"""Build Megatron's OptimizerConfig and DistributedDataParallelConfig from the configuration of a role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from mcontroller.errors import ConfigError
from workers.config import OptimConfig
from workers.config.ddp import DDP_SET_ELSEWHERE
from workers.config.optim import OPTIMIZER_SET_ELSEWHERE
from workers.model.transformer_config import further_fields

__all__ = ["data_parallel_config", "optimizer_config"]


def optimizer_config(optim: OptimConfig, model: TransformerConfig) -> OptimizerConfig:
    """Return Megatron's configuration of the optimizer; needs no process group.

    Args:
        optim: the optimizer; ``optim.megatron`` has further fields of OptimizerConfig.
        model: Megatron's configuration of the model, of which the dtypes are read.

    Raises:
        ConfigError: a field of ``optim.megatron`` is unknown in the installed megatron-core, follows from other fields
            of the configuration, or has a value of another type; OptimizerConfig itself rejects the fields.
    """
    further = further_fields(OptimizerConfig, optim.megatron, "optim.megatron", OPTIMIZER_SET_ELSEWHERE)
    if further.get("use_precision_aware_optimizer") and not gpt_layer_specs.HAVE_TE:
        key = "optim.megatron.use_precision_aware_optimizer"
        text = f"{key}=True needs Transformer Engine's FusedAdam, and the package transformer_engine cannot be imported"
        raise ConfigError(text, key=key, value=True)
    if further.get("optimizer_cpu_offload") and not torch.cuda.is_available():
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
            **further,
        )
    except (AssertionError, RuntimeError, ValueError) as error:
        text = f"OptimizerConfig rejects optim.megatron: {error}"
        raise ConfigError(text, key="optim.megatron", value=optim.megatron) from error


def data_parallel_config(optim: OptimConfig, ddp: Mapping[str, Any]) -> DistributedDataParallelConfig:
    """Return Megatron's configuration of gradient buffers and their reduction; needs no process group.

    Gradients are summed in float32 unless ``ddp`` sets ``grad_reduce_in_fp32``.

    Args:
        optim: whether the optimizer is distributed, and what overlaps with computation.
        ddp: further fields of DistributedDataParallelConfig.

    Raises:
        ConfigError: a field is unknown in the installed megatron-core, follows from ``optim``, or has a value of
            another type; DistributedDataParallelConfig itself rejects the fields.
    """
    fields: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "average_in_collective": False,
        "use_distributed_optimizer": bool(optim.distributed_optimizer),
        "overlap_grad_reduce": optim.overlap_grad_reduce,
        "overlap_param_gather": optim.overlap_param_gather,
    }
    further = further_fields(DistributedDataParallelConfig, ddp, "ddp", DDP_SET_ELSEWHERE)
    if further.get("nccl_ub") and not torch.cuda.is_available():
        raise ConfigError(
            "ddp.nccl_ub=True registers buffers with NCCL, and CUDA is not available; leave it out",
            key="ddp.nccl_ub",
            value=True,
        )
    try:
        return DistributedDataParallelConfig(**(fields | further))
    except (AssertionError, ValueError) as error:
        text = f"DistributedDataParallelConfig rejects ddp: {error}"
        raise ConfigError(text, key="ddp", value=dict(ddp)) from error
