"""Which tensors of a Hugging Face checkpoint each tensor of a Megatron GPT model holds, and how they lie in it.

The names are those of Llama, Qwen2, Qwen3 and Qwen3-MoE. Rotary halves lie alike on both sides: nothing is permuted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcontroller.errors import DataError

__all__ = ["Counterpart", "counterpart"]

_OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
}
_OF_EXPERT = {"1": ("gate_proj.weight", "up_proj.weight"), "2": ("down_proj.weight",)}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.linear_fc([12])\.weight(\d+)")
_VALUE_HEAD = "score.weight"


@dataclass(frozen=True)
class Counterpart:
    """The Hugging Face tensors that lie in one tensor of Megatron's, and where in the order of the model they come.

    ``split`` and ``join`` work on any rank's part as on the whole: a rank holds the same share of each of them.

    Attributes:
        names: one, or several that take turns along dim 0.
        rows: how many rows of each take a turn (q, k and v of one query group); None: each has a single turn.
        layer: counted from 0; -1 before the layers, None after them.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...] | None
    layer: int | None

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The part of each of ``names`` that lies in ``tensor``."""
        if len(self.names) == 1:
            return [tensor]
        rows = self.rows or (tensor.size(0) // len(self.names),) * len(self.names)
        turns = tensor.unflatten(0, (-1, sum(rows)))
        return [part.flatten(0, 1) for part in turns.split(rows, dim=1)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Undoes ``split``."""
        if len(parts) == 1:
            return parts[0]
        turns = parts[0].size(0) // self.rows[0] if self.rows else 1
        return torch.cat([part.unflatten(0, (turns, -1)) for part in parts], dim=1).flatten(0, 1)


def counterpart(name: str, config: Any, value_head: bool) -> Counterpart:
    """What the tensor called ``name`` in the whole Megatron model is in a Hugging Face checkpoint.

    Args:
        config: the model's TransformerConfig.
        value_head: the output layer is one: a sequence classifier's ``score`` with a single label.

    Raises:
        DataError: these families have no such tensor.
    """
    if name in _OUTSIDE_LAYERS:
        is_head = value_head and name == "output_layer.weight"
        return Counterpart(
            names=(_VALUE_HEAD if is_head else _OUTSIDE_LAYERS[name],),
            rows=None,
            layer=-1 if name.startswith("embedding.") else None,
        )
    if in_layer := _LAYER.fullmatch(name):
        names, layer = _names_in_layer(in_layer[2]), int(in_layer[1])
        is_gated = config.gated_linear_unit or ".linear_fc1." not in name
        if names and is_gated and not getattr(config, "attention_output_gate", False):
            rows = _rows_of_group(config) if ".linear_qkv." in name else None
            return Counterpart(tuple(f"model.layers.{layer}.{of_layer}" for of_layer in names), rows, layer)
    raise DataError(
        f"{name} has no counterpart in a Hugging Face checkpoint of Llama, Qwen2, Qwen3 or Qwen3-MoE (RMSNorm, gated "
        "units, no biases but those of q, k and v)",
        tensor=name,
    )


def _names_in_layer(name: str) -> tuple[str, ...]:
    if expert := _EXPERT.fullmatch(name):
        return tuple(f"mlp.experts.{expert[2]}.{of_expert}" for of_expert in _OF_EXPERT[expert[1]])
    return _IN_LAYER.get(name, ())


def _rows_of_group(config: Any) -> tuple[int, int, int]:
    """Rows of q, k and v in one query group of ``linear_qkv``."""
    width = config.kv_channels
    return (config.num_attention_heads // config.num_query_groups * width, width, width)
