"""Qwen2 and Qwen2.5: Llama with biases of q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.weights.hf.families.llama import Llama, names_in_layer
from workers.weights.hf.family import register_model_family


@register_model_family("qwen2")
class Qwen2(Llama):
    """Dense models of Qwen2 and Qwen2.5."""

    architecture = "Qwen2"
    add_qkv_bias = True
    names = Llama.names | names_in_layer(
        {"self_attention.linear_qkv.bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv")}
    )
    constants: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}  # the biases are always there, without a key
    # Without ``use_sliding_window``, which is not built, the other keys of a window are not used.
    inert: ClassVar[tuple[str, ...]] = ("sliding_window", "max_window_layers")
