"""What GLM-4.5 and DeepSeek-V3 share: dense layers first, shared experts, and experts chosen by scores with a bias.

The bias of a router is no parameter: it is loaded, exported and sent to engines with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.weights.hf.families.llama import EXPERT_NAMES, Llama, layers_with_experts, names_in_layer
from workers.weights.hf.fields import Field, count_of, flag_of, layered, not_built, number_of, size, size_of

_COMPUTED = frozenset(
    (
        "mtp_num_layers",
        "moe_router_num_groups",
        "moe_router_score_function",
        "moe_router_topk_scaling_factor",
    )
)


class RoutedByBias(Llama):
    """Not registered: a base of families."""

    has_experts = True
    has_extra_layers = True
    special: ClassVar[Mapping[str, Any]] = {**Llama.special, "moe_router_enable_expert_bias": True}
    names = (
        Llama.names
        | EXPERT_NAMES
        | names_in_layer(
            {
                "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
                "mlp.shared_experts.linear_fc1.weight": (
                    "mlp.shared_experts.gate_proj.weight",
                    "mlp.shared_experts.up_proj.weight",
                ),
                "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight",),
                "enorm.weight": ("enorm.weight",),
                "hnorm.weight": ("hnorm.weight",),
                "eh_proj.weight": ("eh_proj.weight",),
                "final_layernorm.weight": ("shared_head.norm.weight",),
            }
        )
    )
    copies: ClassVar[Mapping[str, str]] = {
        "embedding.word_embeddings.weight": "model.layers.{layer}.embed_tokens.weight",
        "output_layer.weight": "model.layers.{layer}.shared_head.head.weight",
    }
    keys: ClassVar[Mapping[str, Field]] = {
        **Llama.keys,
        "n_routed_experts": size("num_moe_experts"),
        "num_experts_per_tok": size("moe_router_topk"),
        "moe_intermediate_size": size("moe_ffn_hidden_size"),
    }
    inert: ClassVar[tuple[str, ...]] = ("num_nextn_predict_layers", "output_router_logits")
    fixed_transformer: ClassVar[Mapping[str, Any]] = {
        key: value for key, value in Llama.fixed_transformer.items() if key not in _COMPUTED
    } | {"moe_router_score_function": "sigmoid", "moe_shared_expert_gate": False}

    def fields_from(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """As Llama's, with the experts."""
        source, fields = layered(config, self.defaults), super().fields_from(config)
        dense, layers = count_of(source, "first_k_dense_replace"), fields["num_layers"]
        width = fields["moe_ffn_hidden_size"] * size_of(source, "n_shared_experts")
        if dense > layers:
            raise not_built("first_k_dense_replace", dense, f"at most num_hidden_layers={layers}")
        return fields | {
            "transformer": fields["transformer"]
            | {
                "moe_layer_freq": [0] * dense + [1] * (layers - dense),
                "moe_shared_expert_intermediate_size": width,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_bias_update_rate": 0.0,  # as at the end of pretraining: only gradients change the policy
                "moe_router_dtype": "fp32",
                "moe_router_topk_scaling_factor": float(number_of(source, "routed_scaling_factor")),
            }
            | _groups(source),
        }

    def config_from(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As Llama's, with the experts."""
        inside, with_experts = fields["transformer"], layers_with_experts(fields)
        width = fields["moe_ffn_hidden_size"] or fields["ffn_hidden_size"]
        shared = inside.get("moe_shared_expert_intermediate_size") or 0
        if not shared or shared % width:
            expressible = f"a multiple of {width}"
            raise self.not_expressible("model.transformer.moe_shared_expert_intermediate_size", shared, expressible)
        if with_experts != sorted(with_experts):
            raise self.not_expressible(
                "model.transformer.moe_layer_freq", inside["moe_layer_freq"], "dense layers first"
            )
        return super().config_from(fields) | {
            "n_shared_experts": shared // width,
            "moe_intermediate_size": width,
            "first_k_dense_replace": with_experts.count(False),
            "n_group": inside.get("moe_router_num_groups") or 1,
            "topk_group": inside.get("moe_router_group_topk") or 1,
            "routed_scaling_factor": inside.get("moe_router_topk_scaling_factor") or 1.0,
            "norm_topk_prob": fields["moe_router_topk"] > 1,
            "num_nextn_predict_layers": inside.get("mtp_num_layers") or 0,
        }


def _groups(source: Mapping[str, Any]) -> dict[str, Any]:
    """The groups of experts that each token chooses from; none if it chooses from all."""
    chosen, groups, best = (size_of(source, key) for key in ("num_experts_per_tok", "n_group", "topk_group"))
    if flag_of(source, "norm_topk_prob") != (chosen > 1):  # Megatron makes the scores of several experts sum to 1
        raise not_built("norm_topk_prob", source["norm_topk_prob"], chosen > 1)
    if best > groups:
        raise not_built("topk_group", best, f"at most n_group={groups}")
    if best == groups:
        return {}
    experts = size_of(source, "n_routed_experts")
    if experts % groups or experts < 2 * groups:
        raise not_built("n_group", groups, f"a divisor of n_routed_experts={experts}, with several in each group")
    # A group counts as much as its two best experts; in Megatron, as its num_experts_per_tok // topk_group best ones.
    if chosen // best != 2:
        raise not_built("topk_group", best, f"half of num_experts_per_tok={chosen}")
    return {"moe_router_num_groups": groups, "moe_router_group_topk": best}
