"""Nemotron-H: Mamba layers, attention without positions, and MLPs of squared ReLU, each a layer with one norm.

transformers limits the step of a Mamba layer to at least ``time_step_min``; Megatron, which the models were trained
with, does not, and neither does this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.weights.hf.families.llama import Llama
from workers.weights.hf.family import register_model_family
from workers.weights.hf.fields import Field, layered, not_built, number_of, size

_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-"}
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
_OF_EXPERTS = """
    n_routed_experts n_shared_experts moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size
    moe_shared_expert_overlap num_experts_per_tok routed_scaling_factor n_group topk_group norm_topk_prob
    output_router_logits mtp_layers_block_type
"""  # without layers of experts they change nothing
_IMPLEMENTATION = """
    chunk_size expand time_step_min time_step_max time_step_floor num_logits_to_keep use_mamba_kernels
    mamba_ssm_cache_dtype rescale_prenorm_residual auto_map
"""


@register_model_family("nemotron_h")
class NemotronH(Llama):
    """Nemotron-H without experts."""

    architecture = "NemotronH"
    special: ClassVar[Mapping[str, Any]] = {
        name: value for name, value in Llama.special.items() if name != "mamba_num_heads"
    }
    names = {
        "embedding.word_embeddings.weight": ("backbone.embeddings.weight",),
        "decoder.final_layernorm.weight": ("backbone.norm_f.weight",),
        "output_layer.weight": ("lm_head.weight",),
    } | {
        f"decoder.layers.{{layer}}.{ours}": tuple(f"backbone.layers.{{layer}}.{name}" for name in theirs.split())
        for ours, theirs in {
            "mixer.in_proj.layer_norm_weight": "norm.weight",
            "mixer.in_proj.weight": "mixer.in_proj.weight",
            "mixer.conv1d_weight": "mixer.conv1d.weight",
            "mixer.conv1d_bias": "mixer.conv1d.bias",
            "mixer.A_log": "mixer.A_log",
            "mixer.D": "mixer.D",
            "mixer.dt_bias": "mixer.dt_bias",
            "mixer.norm.weight": "mixer.norm.weight",
            "mixer.out_proj.weight": "mixer.out_proj.weight",
            "self_attention.linear_qkv.layer_norm_weight": "norm.weight",
            "self_attention.linear_qkv.weight": "mixer.q_proj.weight mixer.k_proj.weight mixer.v_proj.weight",
            "self_attention.linear_proj.weight": "mixer.o_proj.weight",
            "mlp.linear_fc1.layer_norm_weight": "norm.weight",
            "mlp.linear_fc1.weight": "mixer.up_proj.weight",
            "mlp.linear_fc2.weight": "mixer.down_proj.weight",
        }.items()
    }
    keys: ClassVar[Mapping[str, Field]] = {
        **{key: field for key, field in Llama.keys.items() if key != "rms_norm_eps"},
        "layer_norm_epsilon": Field("layernorm_epsilon", number_of),
        "mamba_num_heads": size("transformer.mamba_num_heads"),
        "mamba_head_dim": size("transformer.mamba_head_dim"),
        "ssm_state_size": size("transformer.mamba_state_dim"),
        "n_groups": size("transformer.mamba_num_groups"),
    }
    constants: ClassVar[Mapping[str, Any]] = {"attention_bias": False}
    defaults: ClassVar[Mapping[str, Any]] = {"tie_word_embeddings": False}
    only_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mamba_hidden_act": ("silu",),
        "mlp_hidden_act": ("relu2",),
        "conv_kernel": (4,),
        "use_conv_bias": (True,),
        "attention_bias": (False, None),
        "use_bias": (False, None),
        "mamba_proj_bias": (False, None),
        "residual_in_fp32": (False, None),
        "hidden_dropout": (0, None),
        "layer_norm_epsilon": (1e-5,),  # of the norms inside Mamba layers, which Megatron has no field for
        "time_step_limit": ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None),
    }
    # The number of layers follows from their letters, and the epsilon is layer_norm_epsilon.
    inert: ClassVar[tuple[str, ...]] = (
        *_OF_EXPERTS.split(),
        *_IMPLEMENTATION.split(),
        "num_hidden_layers",
        "rms_norm_eps",
    )
    fixed: ClassVar[Mapping[str, Any]] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": False,
        "activation": "squared_relu",
        "add_bias_linear": False,
        "position_embedding_type": "none",
        "layernorm_epsilon": 1e-5,
    }

    def differences(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As of its base; the sizes of Mamba layers have to be there."""
        inside = fields.get("transformer", fields)
        missing = {} if inside.get("mamba_num_heads") else {"mamba_num_heads": "a number"}
        return super().differences(fields) | missing

    def fields_from(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """As Llama's, with the letters of the layers."""
        source = layered(config, self.defaults)
        letters = _letters_of(source)
        return super().fields_from(layered({"num_hidden_layers": len(letters)}, config)) | {
            "position_embedding_type": "none",
            "gated_linear_unit": False,
            "activation": "squared_relu",
            "hybrid_layer_pattern": letters,
        }

    def rope_fields(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return nothing: attention has no positions."""
        return {}

    def rope_config(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return nothing, as ``rope_fields``."""
        return {}

    def config_from(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As Llama's, with the kinds of the layers."""
        letters = (fields["hybrid_layer_pattern"] or "").replace("|", "")
        if not letters or not set(letters) <= _KINDS.keys():
            raise self.not_expressible("model.hybrid_layer_pattern", fields["hybrid_layer_pattern"], "M, * and -")
        layers = {"layers_block_type": [_KINDS[letter] for letter in letters], "hybrid_override_pattern": letters}
        return super().config_from(fields) | layers


def _letters_of(source: Mapping[str, Any]) -> str:
    """Return the letters of all layers, of transformers 5 or of the model's own code."""
    kinds, letters = source.get("layers_block_type"), source.get("hybrid_override_pattern", "")
    if kinds is None:
        kinds = [_KINDS.get(letter, letter) for letter in letters]
    other = [kind for kind in kinds if kind not in _LETTERS]
    if other or not kinds:
        raise not_built("layers_block_type", other or kinds, [*_LETTERS])
    return "".join(_LETTERS[kind] for kind in kinds)
