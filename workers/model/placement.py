"""The device and the dtype of a model: one rule for built-in and user-defined models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import ModelParallelConfig
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.moe.router import Router
from megatron.core.utils import unwrap_model

from mcontroller.errors import ConfigError

# Sums and biases over experts, and tables of cosines: Megatron makes them in float32 on purpose, in models of any
# dtype. Float16Module casts them too, and routers undo that for their biases at every forward pass.
_BUFFERS_AS_MADE = (Router, YarnRotaryEmbedding)


@torch.no_grad()
def place_chunks(chunks: Sequence[torch.nn.Module], device: torch.device) -> None:
    """Move model chunks to ``device`` and cast them to their dtype, in place.

    The rule is Megatron-LM's, whose ``get_model`` calls ``cuda()`` and then ``Float16Module``, and is the same on a
    CPU:

    - Every parameter and buffer goes to the device.
    - Every floating-point parameter is cast to ``chunk_dtype`` of its chunk. So is every floating-point buffer, except
      the ones that Megatron keeps in float32: the buffers of MoE routers and of YaRN's rotary embedding.
    - Tensors that are neither parameter nor buffer stay, such as the frequencies of rotary embeddings. Megatron makes
      these on the device, in float32.

    Parameters keep Megatron's attributes between the CPU and a GPU. Call this before DistributedDataParallel and the
    optimizer are built; a second call changes nothing.

    Args:
        chunks: this rank's model chunks.
        device: the device of the rank.

    Raises:
        ConfigError: as ``chunk_dtype``; before any chunk is changed.
    """
    for chunk, dtype in [(chunk, chunk_dtype(chunk)) for chunk in chunks]:
        chunk.to(device)
        for module in chunk.modules():
            tensors: list[torch.Tensor] = list(module.parameters(recurse=False))
            if not isinstance(module, _BUFFERS_AS_MADE):
                tensors += module.buffers(recurse=False)
            for tensor in tensors:
                if tensor.is_floating_point() and tensor.dtype != dtype:
                    tensor.data = tensor.data.to(dtype)


def chunk_dtype(chunk: torch.nn.Module) -> torch.dtype:
    """Return the dtype of a model chunk: ``params_dtype`` of its Megatron config.

    Raises:
        ConfigError: the chunk has no Megatron config, or one whose ``bf16`` or ``fp16`` contradicts it.
    """
    config = getattr(unwrap_model(chunk), "config", None)
    if not isinstance(config, ModelParallelConfig):
        raise ConfigError(
            f"{type(chunk).__name__}.config is {type(config).__name__}, but a model chunk needs one with the dtype of "
            "its parameters: set .config to Megatron's TransformerConfig",
            key="config",
            value=config,
        )
    dtype: torch.dtype = config.params_dtype
    for flag, expected in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if getattr(config, flag) and dtype != expected:
            raise ConfigError(
                f"{type(chunk).__name__}.config has {flag}=True and params_dtype={dtype}, which contradict each other: "
                f"set params_dtype={expected}, or {flag}=False",
                key="params_dtype",
                value=dtype,
            )
    return dtype
