"""DeepSeek-V3 and Kimi-K2: compressed queries, keys and values, and experts chosen by scores with a bias.

Their published weights are in FP8 with a scale for each block, and are read as floating-point numbers of the model's
dtype. An export has no FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.weights.hf.families.llama import ROPE_DEFAULT, Llama, names_in_layer, rope_kind
from workers.weights.hf.families.routed_by_bias import RoutedByBias
from workers.weights.hf.family import register_model_family
from workers.weights.hf.fields import Field, layered, not_built, number_of, optional_size_of, size, size_of

# Name in config.json -> name in Megatron.
_YARN = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_ROPE_KEYS = {"default": ROPE_DEFAULT, "yarn": (*ROPE_DEFAULT, *_YARN, "truncate")}
_NOT_COMPRESSED = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.layer_norm_weight")
_QUANTIZATION = frozenset(
    ("quant_method", "fmt", "weight_block_size", "activation_scheme", "scale_fmt", "modules_to_not_convert")
)
"""Keys of ``quantization_config`` that are read, or that the scales and the dtypes of the tensors say too."""


@register_model_family("deepseek_v3")
class DeepseekV3(RoutedByBias):
    """DeepSeek-V3 and R1, Moonlight, and models in the same format."""

    architecture = "DeepseekV3"
    qk_layernorm = True
    special: ClassVar[Mapping[str, Any]] = {**RoutedByBias.special, "multi_latent_attention": True}
    names = {
        ours: theirs for ours, theirs in RoutedByBias.names.items() if not ours.endswith(_NOT_COMPRESSED)
    } | names_in_layer(
        {
            "self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight",),
            "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight",),
            "self_attention.linear_q_up_proj.layer_norm_weight": ("self_attn.q_a_layernorm.weight",),
            "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight",),
            "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
            "self_attention.linear_kv_up_proj.layer_norm_weight": ("self_attn.kv_a_layernorm.weight",),
            "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight",),
        }
    )
    keys: ClassVar[Mapping[str, Field]] = {
        **RoutedByBias.keys,
        "q_lora_rank": Field("transformer.q_lora_rank", optional_size_of),
        "kv_lora_rank": size("transformer.kv_lora_rank"),
        "qk_nope_head_dim": size("transformer.qk_head_dim"),
        "qk_rope_head_dim": size("transformer.qk_pos_emb_head_dim"),
        "v_head_dim": size("transformer.v_head_dim"),
    }
    # transformers does without the last two; vLLM builds no bias of the router if topk_method is missing.
    constants: ClassVar[Mapping[str, Any]] = {
        **RoutedByBias.constants,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    # ``qk_head_dim`` follows from the other widths; the rest is read by other code only.
    inert: ClassVar[tuple[str, ...]] = (
        *RoutedByBias.inert,
        "qk_head_dim",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "auto_map",
    )
    only_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Llama.only_built,
        "rope_interleave": (True,),
        "moe_layer_freq": (1, None),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        **RoutedByBias.defaults,
        "rope_interleave": True,
        "q_lora_rank": 1536,
        "num_key_value_heads": 128,
    }

    def fields_from(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """As of its base, with the widths of the compressed attention."""
        source = layered(config, self.defaults)
        fields = super().fields_from(layered({"head_dim": None}, config))
        heads, groups = fields["num_attention_heads"], fields["num_query_groups"]
        if groups != heads:
            raise not_built("num_key_value_heads", groups, heads)
        if source.get("head_dim") not in (None, source["qk_rope_head_dim"]):
            raise not_built("head_dim", source["head_dim"], source["qk_rope_head_dim"])
        _check_quantization(source.get("quantization_config"))
        inside = fields["transformer"] | {"multi_latent_attention": True} | self._positions(source)
        return fields | {
            "kv_channels": inside["qk_head_dim"] + inside["qk_pos_emb_head_dim"],
            "transformer": inside,
        }

    def config_from(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As of its base."""
        return super().config_from(fields) | {"head_dim": fields["transformer"]["qk_pos_emb_head_dim"]}

    def rope_fields(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return the base; what scales the positions is in the fields of Megatron's configuration."""
        return {"rotary_base": int(self.rope_of(source)["rope_theta"])}

    def rope_config(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """For transformers 5 and for earlier versions."""
        theta, inside = float(fields["rotary_base"]), fields["transformer"]
        scaled = None
        if inside.get("rope_type", "yarn") == "yarn":
            scaled = {"rope_type": "yarn"} | {key: inside[ours] for key, ours in _YARN.items()}
            if not scaled["mscale_all_dim"]:
                del scaled["mscale"], scaled["mscale_all_dim"]
        return {
            "rope_theta": theta,
            "rope_scaling": None if scaled is None else scaled | {"type": "yarn"},
            "rope_parameters": (scaled or {"rope_type": "default"}) | {"rope_theta": theta},
        }

    def _positions(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of Megatron's configuration for rotary positions."""
        rope = {"beta_fast": 32, "beta_slow": 1, "truncate": True} | {
            key: value for key, value in self.rope_of(source).items() if value is not None
        }
        if rope_kind(self.rope_of(source), _ROPE_KEYS) == "default":
            return {"rope_type": "rope"}
        if rope["truncate"] is not True:
            raise not_built("truncate", rope["truncate"], True)
        # Without these two, transformers scales all angles' cosines by the factor alone: as Megatron with 1 and 0.
        if (rope.get("mscale") or 0) * (rope.get("mscale_all_dim") or 0) == 0:
            if rope.get("mscale_all_dim"):
                raise not_built("mscale_all_dim", rope["mscale_all_dim"], "nothing, or a number beside mscale")
            rope |= {"mscale": 1.0, "mscale_all_dim": 0.0}
        values = {key: float(rope[key] if key == "mscale_all_dim" else number_of(rope, key)) for key in _YARN}
        length = size_of(rope, "original_max_position_embeddings")
        return {"rope_type": "yarn", **{ours: values[key] for key, ours in _YARN.items()}} | {
            "original_max_position_embeddings": length
        }


@register_model_family("kimi_k2")
class KimiK2(DeepseekV3):
    """Kimi-K2, whose format is DeepSeek-V3's."""

    reference_type = "deepseek_v3"


def _check_quantization(quantization: Any) -> None:
    """Check that weights are as they are, or in FP8 with a scale for each block."""
    if quantization is None:
        return
    if not isinstance(quantization, Mapping):
        raise not_built("quantization_config", quantization, "an object")
    for key, value in {"quant_method": "fp8", "fmt": "e4m3"}.items():
        if quantization.get(key, value if key == "fmt" else None) != value:
            raise not_built(f"quantization_config.{key}", quantization.get(key), value)
    for key in quantization.keys() - _QUANTIZATION:
        if quantization[key] not in (None, False, [], {}):
            raise not_built(f"quantization_config.{key}", quantization[key], None)
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise not_built("quantization_config.weight_block_size", block, "two numbers, as [128, 128]")
