"""Qwen3-MoE: Qwen3 with a mixture of experts in some layers, or in all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.weights.hf.families.llama import Llama, names_in_layer
from workers.weights.hf.families.qwen3 import Qwen3
from workers.weights.hf.family import register_model_family

__all__ = ["Qwen3Moe"]


@register_model_family("qwen3_moe")
class Qwen3Moe(Qwen3):
    """Mixtures of experts of Qwen3."""

    architecture = "Qwen3Moe"
    has_experts = True
    names = Qwen3.names | names_in_layer(
        {
            "mlp.router.weight": ("mlp.gate.weight",),
            "mlp.experts.linear_fc1.weight{expert}": (
                "mlp.experts.{expert}.gate_proj.weight",
                "mlp.experts.{expert}.up_proj.weight",
            ),
            "mlp.experts.linear_fc2.weight{expert}": ("mlp.experts.{expert}.down_proj.weight",),
        }
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        **Llama.defaults,  # without the head width: here it follows from the sizes
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    }

    def fields_from(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """As Qwen3's, with the experts."""
        source = {**self.defaults, **config}
        dense = source.get("mlp_only_layers") or ()
        every = source["decoder_sparse_step"]
        fields = super().fields_from(config)
        with_experts = [int(layer not in dense and (layer + 1) % every == 0) for layer in range(fields["num_layers"])]
        return fields | {
            # ``num_local_experts`` since transformers 5, ``num_experts`` before.
            "num_moe_experts": source.get("num_local_experts") or source.get("num_experts") or 128,
            "moe_router_topk": source["num_experts_per_tok"],
            "moe_ffn_hidden_size": source["moe_intermediate_size"],
            "transformer": {
                "moe_layer_freq": with_experts,
                # Softmax over the chosen experts alone is softmax over all, made to sum to 1 over the chosen.
                "moe_router_pre_softmax": not source["norm_topk_prob"],
                "moe_router_dtype": "fp32",
            },
        }

    def config_from(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As Qwen3's, with the experts."""
        every = fields["transformer"].get("moe_layer_freq", 1)
        layers = range(fields["num_layers"])
        with_experts = [layer % every == 0 for layer in layers] if isinstance(every, int) else every
        width = fields["moe_ffn_hidden_size"] or fields["ffn_hidden_size"] or 4 * fields["hidden_size"]
        return super().config_from(fields) | {
            "num_experts": fields["num_moe_experts"],
            "num_local_experts": fields["num_moe_experts"],
            "num_experts_per_tok": fields["moe_router_topk"],
            "moe_intermediate_size": width,
            "norm_topk_prob": not fields["transformer"].get("moe_router_pre_softmax", False),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer in layers if not with_experts[layer]],
        }
