"""Small models with known weights, on ranks in any layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from parallel_state.megatron import MegatronContext
from tests.training import new_context
from tests.workers.full_state import full_state_dict, load_full_state_dict
from workers.config import ModelConfig, ParallelConfig
from workers.model.build import build_model
from workers.weights.shards import named_buffers

MODEL = ModelConfig(
    vocab_size=61,  # padded to 62 by tp2 and to 64 by tp4
    max_sequence_length=32,
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=4,
    ffn_hidden_size=64,
    add_qkv_bias=True,
)
TIED = dataclasses.replace(MODEL, tie_embeddings=True)
EXPERTS = dataclasses.replace(
    MODEL,
    num_layers=2,
    num_moe_experts=4,
    moe_ffn_hidden_size=32,
    transformer={"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
)


def built(model: ModelConfig, axes: dict[str, Any]) -> tuple[list[nn.Module], MegatronContext]:
    """Return this rank's chunks of a model, whose numbers are all different and the same in every layout."""
    parallel = ParallelConfig(**axes)
    context = new_context(parallel)
    chunks = build_model(model, parallel, context, initialize=False)
    generator = torch.Generator().manual_seed(2)
    state = {}
    for name, whole in sorted(full_state_dict(chunks, context).items()):
        state[name] = torch.randn(whole.shape, generator=generator).to(whole.dtype)
    load_full_state_dict(chunks, context, state)
    for _, buffer in named_buffers(chunks, context):
        buffer.copy_(torch.linspace(1, 2, len(buffer)))
    return chunks, context
