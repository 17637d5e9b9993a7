"""Where a model's numbers are and in which dtype: one rule for every model, our own and a user's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import ModelParallelConfig
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.moe.router import Router
from megatron.core.utils import unwrap_model

from mcontroller.errors import ConfigError

__all__ = ["chunk_dtype", "place_chunks"]

# Sums and biases over experts, and tables of cosines: Megatron makes them in float32 on purpose, whatever the model's
# dtype. Float16Module casts them too, and routers undo that for their biases at every forward pass.
_BUFFERS_AS_MADE = (Router, YarnRotaryEmbedding)


@torch.no_grad()
def place_chunks(chunks: Sequence[torch.nn.Module], device: torch.device) -> None:
    """Move model chunks to ``device`` and cast them to their dtype, in place.

    The rule is that of Megatron-LM, whose ``get_model`` calls ``cuda()`` and then ``Float16Module``, and it holds on a
    CPU as well:

    - Every parameter and buffer goes to the device.
    - Every floating-point parameter is cast to ``chunk_dtype`` of its chunk. So is every floating-point buffer, except
      those that Megatron keeps in float32: the buffers of MoE routers and of YaRN's rotary embedding.
    - Tensors that are neither parameter nor buffer stay, such as the frequencies of rotary embeddings. Megatron makes
      these on the device, in float32.

    Parameters keep Megatron's attributes between the CPU and a GPU. Call this before DistributedDataParallel and the
    optimizer take the parameters over; a second call changes nothing.

    Raises:
        ConfigError: as ``chunk_dtype``; before any chunk is changed.
    """
    for chunk, dtype in [(chunk, chunk_dtype(chunk)) for chunk in chunks]:
        chunk.to(device)
        for module in chunk.modules():
            held: list[torch.Tensor] = list(module.parameters(recurse=False))
            if not isinstance(module, _BUFFERS_AS_MADE):
                held += module.buffers(recurse=False)
            for tensor in held:
                if tensor.is_floating_point() and tensor.dtype != dtype:
                    tensor.data = tensor.data.to(dtype)


def chunk_dtype(chunk: torch.nn.Module) -> torch.dtype:
    """The dtype of a model chunk: ``params_dtype`` of its Megatron config, with which ``bf16`` and ``fp16`` must agree.

    Raises:
        ConfigError: the chunk has no Megatron config, or one that contradicts itself.
    """
    config = getattr(unwrap_model(chunk), "config", None)
    if not isinstance(config, ModelParallelConfig):
        raise ConfigError(
            f"{type(chunk).__name__}.config is {type(config).__name__}, but a model chunk needs the config that says "
            "its dtype: give it Megatron's TransformerConfig as config",
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
