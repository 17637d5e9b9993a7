"""Qwen3-MoE: Qwen3 with a mixture of experts in some layers, or in all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.weights.hf.families.llama import EXPERT_NAMES, Llama, layers_with_experts
from workers.weights.hf.families.qwen3 import Qwen3
from workers.weights.hf.family import register_model_family
from workers.weights.hf.fields import Field, flag_of, layered, not_built, optional_size_of, size, size_of


@register_model_family("qwen3_moe")
class Qwen3Moe(Qwen3):
    """Mixtures of experts of Qwen3."""

    architecture = "Qwen3Moe"
    has_experts = True
    names = Qwen3.names | EXPERT_NAMES
    keys: ClassVar[Mapping[str, Field]] = {
        **Qwen3.keys,
        "num_experts_per_tok": size("moe_router_topk"),
        "moe_intermediate_size": size("moe_ffn_hidden_size"),
    }
    # Megatron's losses of the router are set in model.transformer.
    inert: ClassVar[tuple[str, ...]] = (*Qwen3.inert, "router_aux_loss_coef", "output_router_logits")
    defaults: ClassVar[Mapping[str, Any]] = Llama.defaults  # without the head width, which follows from the sizes

    def fields_from(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """As Qwen3's, with the experts."""
        source = layered(config, self.defaults)
        fields = super().fields_from(config)
        dense = source.get("mlp_only_layers") or ()
        if not isinstance(dense, list | tuple) or any(type(layer) is not int for layer in dense):
            raise not_built("mlp_only_layers", dense, "a list of numbers of layers")
        every = size_of(source, "decoder_sparse_step")
        with_experts = [int(layer not in dense and (layer + 1) % every == 0) for layer in range(fields["num_layers"])]
        return fields | {
            "num_moe_experts": _experts_of(source),
            "transformer": {
                "moe_layer_freq": with_experts,
                # Softmax over the chosen experts alone is softmax over all, made to sum to 1 over the chosen.
                "moe_router_pre_softmax": not flag_of(source, "norm_topk_prob"),
                "moe_router_dtype": "fp32",
            },
        }

    def config_from(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As Qwen3's, with the experts."""
        width = fields["moe_ffn_hidden_size"] or fields["ffn_hidden_size"] or 4 * fields["hidden_size"]
        return super().config_from(fields) | {
            "num_experts": fields["num_moe_experts"],
            "num_local_experts": fields["num_moe_experts"],
            "moe_intermediate_size": width,
            "norm_topk_prob": not fields["transformer"].get("moe_router_pre_softmax", False),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, routed in enumerate(layers_with_experts(fields)) if not routed],
        }


def _experts_of(source: Mapping[str, Any]) -> int:
    """From ``num_local_experts`` (transformers 5) or ``num_experts`` (before)."""
    new, old = (optional_size_of(source, key) for key in ("num_local_experts", "num_experts"))
    if new is not None and old is not None and new != old:
        raise not_built("num_local_experts", new, old)
    return new or old or size_of(source, "num_experts")
