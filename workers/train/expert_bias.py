"""Move the bias of experts in the step of the optimizer, by the tokens of all gradients that the step applies.

Megatron moves it whenever gradients are finalized: also if their step is skipped or never made, and once for each call
that adds gradients to a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor, nn


@contextlib.contextmanager
def keeping_expert_bias(config: TransformerConfig) -> Iterator[None]:
    """Context manager in which Megatron finalizes gradients, and leaves the bias and the counts of routers alone."""
    before = config.moe_router_enable_expert_bias, config.moe_router_load_balancing_type
    config.moe_router_enable_expert_bias, config.moe_router_load_balancing_type = False, "none"
    try:
        yield
    finally:
        config.moe_router_enable_expert_bias, config.moe_router_load_balancing_type = before


def reset_token_counts(chunks: Sequence[nn.Module]) -> None:
    """Set the tokens that routers counted to 0: those of a step that was made, skipped or dropped, or that raised."""
    for chunk in chunks:
        for module in chunk.modules():
            for name in ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps"):
                count = getattr(module, name, None)
                if isinstance(count, Tensor):
                    count.zero_()


def move_expert_bias(chunks: Sequence[nn.Module]) -> None:
    """Move the bias of each expert toward equal numbers of tokens (a collective over tp, cp and dp).

    Args:
        chunks: this rank's model chunks; their routers have counted the tokens of the step.
    """
    routers = [
        module for chunk in chunks for module in chunk.modules() if getattr(module, "expert_bias", None) is not None
    ]
    if not routers:
        return
    tokens = torch.stack([router.local_tokens_per_expert for router in routers])
    bias = torch.stack([router.expert_bias for router in routers])
    rate = get_model_config(chunks[0]).moe_router_bias_update_rate
    for router, moved in zip(routers, get_updated_expert_bias(tokens, bias, rate), strict=True):
        router.expert_bias.copy_(moved)
