"""Qwen3: Llama with a norm of each head of q and k, and a separate head width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.weights.hf.families.llama import Llama, names_in_layer
from workers.weights.hf.families.qwen2 import Qwen2
from workers.weights.hf.family import register_model_family


@register_model_family("qwen3")
class Qwen3(Llama):
    """Dense models of Qwen3."""

    architecture = "Qwen3"
    qk_layernorm = True
    names = Llama.names | names_in_layer(
        {
            "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
            "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
        }
    )
    inert: ClassVar[tuple[str, ...]] = Qwen2.inert
    defaults: ClassVar[Mapping[str, Any]] = {**Llama.defaults, "head_dim": 128}
