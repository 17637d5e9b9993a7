"""Tiny models and layouts with the structure of large ones, for a laptop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from parallel_state.dry_run.one_layer import CUSTOM_SPLIT, fields_of_one_layer
from parallel_state.layout import ParallelLayout
from workers.config import ModelConfig

_HEADS, _HEAD, _WIDE, _NARROW = 4, 8, 64, 32
_VOCABULARY, _LENGTH, _EXPERTS = 64, 32, 8
# Splits of layers over stages that hold for the numbers of the large model only, and what changes the precision.
_DROPPED = (
    *CUSTOM_SPLIT, "fp8", "fp8_recipe", "fp8_param", "fp4", "fp4_recipe", "first_last_layers_bf16", "cpu_offloading",
    "fine_grained_activation_offloading", "offload_modules",
)  # fmt: skip


def small_layout(layout: ParallelLayout, most_ranks: int) -> ParallelLayout:
    """Return the layout with its largest axes halved until it has no more ranks, or all of them are 2 or less."""
    sizes = {axis: layout.sizes[axis] for axis in ("tp", "pp", "cp", "dp", "ep")}
    etp = layout.etp
    while max(sizes.values()) > 2 and _ranks(sizes) > most_ranks:
        axis = max(sizes, key=lambda name: sizes[name])
        sizes[axis] = -(-sizes[axis] // 2)
    if etp is not None:
        etp = min(etp, sizes["tp"])
    dp = max(sizes["dp"], -(-sizes["ep"] * (sizes["tp"] if etp is None else etp) // (sizes["tp"] * sizes["cp"])))
    axes: dict[str, Any] = {axis: size for axis, size in sizes.items() if axis != "dp"}
    vpp = None if layout.vpp is None else 2
    return ParallelLayout(sizes["tp"] * sizes["pp"] * sizes["cp"] * dp, **axes, etp=etp, vpp=vpp, order=layout.order)


def _ranks(sizes: dict[str, int]) -> int:
    return sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"]


def small_model(model: ModelConfig, layout: ParallelLayout) -> ModelConfig:
    """Return a model of the same structure, with few layers, channels, heads and experts, and random float32 weights.

    Args:
        model: the model.
        layout: the layout that must divide it.
    """
    stages = layout.pp * (layout.vpp or 1)
    layers = min(model.num_layers, 2) if stages == 1 else stages
    if model.names_layers:
        layers = model.num_layers
    heads = max(_HEADS, 2 * layout.tp)
    grouped = model.num_query_groups not in (None, model.num_attention_heads)
    experts = None if model.num_moe_experts is None else max(min(model.num_moe_experts, _EXPERTS), 2 * layout.ep)
    transformer = {name: value for name, value in model.transformer.items() if name not in _DROPPED}
    if transformer.get("moe_shared_expert_intermediate_size"):
        transformer["moe_shared_expert_intermediate_size"] = _NARROW
    if isinstance(pattern := transformer.get("moe_layer_freq"), Sequence):
        transformer["moe_layer_freq"] = _both_kinds(pattern, layers)
    return dataclasses.replace(
        model,
        vocab_size=min(model.vocab_size, _VOCABULARY) // layout.tp * layout.tp,  # padding has no global name
        max_sequence_length=_LENGTH,
        num_layers=layers,
        hidden_size=_HEAD * heads,
        num_attention_heads=heads,
        num_query_groups=heads // 2 if grouped else None,
        kv_channels=None if model.kv_channels is None else _HEAD,
        ffn_hidden_size=_WIDE * layout.tp,
        num_moe_experts=experts,
        moe_router_topk=min(model.moe_router_topk, 2),
        moe_ffn_hidden_size=None if model.moe_ffn_hidden_size is None else _NARROW * layout.tp,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        dtype="float32",
        transformer_impl="local",
        hf_path=None,
        transformer=transformer,
    )


def one_layer_a_stage(model: ModelConfig, layout: ParallelLayout) -> ModelConfig:
    """Return a model with the last layer of each stage, and all sizes but the number of layers."""
    changed = fields_of_one_layer(model.transformer, model.num_layers, layout)
    num_layers = changed.pop("num_layers")
    return dataclasses.replace(model, num_layers=num_layers, transformer=model.transformer | changed)


def _both_kinds(pattern: Sequence[int], layers: int) -> list[int]:
    """Return a pattern of dense layers and layers with experts that has both kinds if the long one has."""
    if layers == 1 or len(set(pattern)) == 1:
        return [pattern[-1]] * layers
    return [pattern[0], *[1 - pattern[0]] * (layers - 1)]
