"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.weights.hf.families.llama import names_in_layer
from workers.weights.hf.families.mistral import Mistral
from workers.weights.hf.family import register_model_family
from workers.weights.hf.fields import Field, size


@register_model_family("mixtral")
class Mixtral(Mistral):
    """Mixtral 8x7B and 8x22B."""

    architecture = "Mixtral"
    has_experts = True
    names = Mistral.names | names_in_layer(
        {
            "mlp.router.weight": ("block_sparse_moe.gate.weight",),
            "mlp.experts.linear_fc1.weight{expert}": (
                "block_sparse_moe.experts.{expert}.w1.weight",
                "block_sparse_moe.experts.{expert}.w3.weight",
            ),
            "mlp.experts.linear_fc2.weight{expert}": ("block_sparse_moe.experts.{expert}.w2.weight",),
        }
    )
    keys: ClassVar[Mapping[str, Field]] = {
        **Mistral.keys,
        "num_local_experts": size("num_moe_experts"),
        "num_experts_per_tok": size("moe_router_topk"),
    }
    # Megatron's losses of the router are set in model.transformer.
    inert: ClassVar[tuple[str, ...]] = ("router_aux_loss_coef", "output_router_logits")
    only_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {**Mistral.only_built, "router_jitter_noise": (0, None)}
    defaults: ClassVar[Mapping[str, Any]] = {**Mistral.defaults, "sliding_window": None, "rms_norm_eps": 1e-5}
    rope_theta = 1e6

    def fields_from(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """As Mistral's, with the experts."""
        fields = super().fields_from(config)
        routing = {
            # Softmax over the chosen experts alone is softmax over all, made to sum to 1 over the chosen.
            "moe_router_pre_softmax": False,
            "moe_router_dtype": "fp32",
        }
        return fields | {
            "moe_ffn_hidden_size": fields["ffn_hidden_size"],
            "transformer": fields["transformer"] | routing,
        }

    def config_from(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As Mistral's, with the experts."""
        expressible = {"moe_layer_freq": 1, "moe_router_pre_softmax": False}
        for key, value in expressible.items():
            if fields["transformer"].get(key, value) != value:
                raise self.not_expressible(f"model.transformer.{key}", fields["transformer"][key], value)
        config = super().config_from(fields)
        return config | {"intermediate_size": fields["moe_ffn_hidden_size"] or config["intermediate_size"]}
