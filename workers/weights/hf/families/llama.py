"""Llama: a dense decoder with RMSNorm, rotary positions, grouped queries, gated SiLU units and no biases.

Rotary halves lie the same way in both formats: no weight is permuted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mcontroller.errors import ConfigError
from workers.weights.hf.family import ModelFamily, register_model_family
from workers.weights.hf.fields import Field, flag_of, layered, not_built, number_of, optional_size_of, size

_DTYPES = ("float32", "bfloat16", "float16")
# The one scaling of rotary positions that Megatron has, with the three numbers that it has fixed.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_PARTIAL = "partial_rotary_factor"
ROPE_DEFAULT = ("rope_type", "type", "rope_theta", _PARTIAL)
_ROPE_KEYS = {"default": ROPE_DEFAULT, "llama3": (*ROPE_DEFAULT, *_LLAMA3, "factor")}


def names_in_layer(names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return ``names`` of one layer as names of the whole model, on both sides."""
    return {
        f"decoder.layers.{{layer}}.{ours}": tuple(f"model.layers.{{layer}}.{name}" for name in theirs)
        for ours, theirs in names.items()
    }


EXPERT_NAMES = names_in_layer(
    {
        "mlp.router.weight": ("mlp.gate.weight",),
        "mlp.experts.linear_fc1.weight{expert}": (
            "mlp.experts.{expert}.gate_proj.weight",
            "mlp.experts.{expert}.up_proj.weight",
        ),
        "mlp.experts.linear_fc2.weight{expert}": ("mlp.experts.{expert}.down_proj.weight",),
    }
)
"""The names of most families that have experts."""


@register_model_family("llama")
class Llama(ModelFamily):
    """Llama 2, 3, 3.1 to 3.3, and models in the same format such as SmolLM2.

    Attributes:
        defaults: what the family's configuration class in transformers supplies if ``config.json`` omits a key that
            published files omit too; without any other key that is read, a file is rejected.
        keys: keys of ``config.json`` that are one field of ``ModelConfig`` each, read and written as they are.
        constants: keys with values that an export always has.
        fixed: fields of ``ModelConfig`` that the family's ``config.json`` has no key for, and their values.
        fixed_transformer: the same of ``ModelConfig.transformer``.
        rope_theta: what transformers supplies if ``config.json`` has no ``rope_theta``.
        rotated: the same for ``partial_rotary_factor``; None: all channels of a head are rotated.
    """

    architecture = "Llama"
    names = {
        "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
        "decoder.final_layernorm.weight": ("model.norm.weight",),
        "output_layer.weight": ("lm_head.weight",),
    } | names_in_layer(
        {
            "input_layernorm.weight": ("input_layernorm.weight",),
            "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
            "self_attention.linear_qkv.weight": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
            "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
            "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
            "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
            "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
        }
    )

    defaults: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    only_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {"hidden_act": ("silu",), "attention_bias": (False, None)}
    keys: ClassVar[Mapping[str, Field]] = {
        "vocab_size": size("vocab_size"),
        "max_position_embeddings": size("max_sequence_length"),
        "num_hidden_layers": size("num_layers"),
        "hidden_size": size("hidden_size"),
        "num_attention_heads": size("num_attention_heads"),
        "intermediate_size": size("ffn_hidden_size"),
        "rms_norm_eps": Field("layernorm_epsilon", number_of),
        "tie_word_embeddings": Field("tie_embeddings", flag_of),
    }
    constants: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "attention_bias": False}
    fixed: ClassVar[Mapping[str, Any]] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation": "silu",
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
    }
    fixed_transformer: ClassVar[Mapping[str, Any]] = {
        "activation_func_clamp_value": None,
        "apply_residual_connection_post_layernorm": False,
        "attention_output_gate": False,
        "glu_linear_offset": 0.0,
        "layernorm_zero_centered_gamma": False,
        "moe_apply_probs_on_input": False,
        "moe_router_num_groups": None,
        "moe_router_score_function": "softmax",
        "moe_router_topk_scaling_factor": None,
        "mtp_num_layers": None,
        "no_rope_freq": None,
        "qk_l2_norm": False,
        "rotary_interleaved": False,
        "softmax_scale": None,
        "softmax_type": "vanilla",
        "use_mup": False,
    }
    rope_theta: ClassVar[float] = 10000.0
    rotated: ClassVar[float | None] = None

    def fields_from(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of ``ModelConfig`` that ``config.json`` determines; see ``ModelFamily.fields_from``."""
        source = layered(config, self.defaults)
        missing = [key for key, (_, read) in self.keys.items() if read != optional_size_of and source.get(key) is None]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}", key=missing[0], value=None)
        for key, built in self.only_built.items():
            if source.get(key) not in built:
                raise not_built(key, source.get(key), built[0])
        layers = source.get("layer_types") or ()
        if not isinstance(layers, list | tuple) or any(kind != "full_attention" for kind in layers):
            raise not_built("layer_types", layers, "full_attention throughout")
        if layers and len(layers) != source["num_hidden_layers"]:
            raise not_built("layer_types", layers, f"one for each of {source['num_hidden_layers']} layers")
        values = {field.name: field.read(source, key) for key, field in self.keys.items()}
        inside = {name: values.pop(name) for name in list(values) if name.startswith("transformer.")}
        heads = values["num_attention_heads"]
        return {
            "num_query_groups": optional_size_of(source, "num_key_value_heads") or heads,
            "kv_channels": optional_size_of(source, "head_dim") or values["hidden_size"] // heads,
            "add_qkv_bias": self.add_qkv_bias,
            "qk_layernorm": self.qk_layernorm,
            "dtype": _dtype_of(source),
            "transformer": {name.removeprefix("transformer."): value for name, value in inside.items()},
            **values,
            **self.rope_fields(source),
        }

    def config_from(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``config.json`` of a model of this family; see ``ModelFamily.config_from``."""
        for key, value in self.fixed.items():
            if fields[key] != value:
                raise self.not_expressible(f"model.{key}", fields[key], value)
        extra = fields["transformer"]
        for key, value in self.fixed_transformer.items():
            if extra.get(key, value) != value:
                raise self.not_expressible(f"model.transformer.{key}", extra[key], value)
        return {
            **self.constants,
            **{key: field.of(fields) for key, field in self.keys.items()},
            "intermediate_size": fields["ffn_hidden_size"] or 4 * fields["hidden_size"],
            "num_key_value_heads": fields["num_query_groups"] or fields["num_attention_heads"],
            "head_dim": fields["kv_channels"] or fields["hidden_size"] // fields["num_attention_heads"],
            "initializer_range": fields["init_method_std"],
            "dtype": fields["dtype"],
            "torch_dtype": fields["dtype"],
        } | self.rope_config(fields)

    def rope_of(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of rotary positions with ``rope_theta``, from whichever places they are in.

        Raises:
            ConfigError: two places disagree, or the base or the part of a head that is rotated is not supported.
        """
        rope = {"rope_theta": self.rope_theta} | _merged_rope(source)
        if (theta := number_of(rope, "rope_theta")) != int(theta):
            raise not_built("rope_theta", theta, "a whole number")
        if self.rotated is None and rope.get(_PARTIAL) not in (None, 1.0):
            raise not_built(_PARTIAL, rope[_PARTIAL], 1.0)
        return rope

    def rope_fields(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
        rope = self.rope_of(source)
        fields: dict[str, Any] = {"rotary_base": int(rope["rope_theta"])}
        if self.rotated is not None:
            fields["rotary_percent"] = float(number_of({"partial_rotary_factor": self.rotated} | rope, _PARTIAL))
        if rope_kind(rope, _ROPE_KEYS) == "default":
            return fields
        for key, fixed in _LLAMA3.items():
            if rope.get(key) != fixed:
                raise not_built(key, rope.get(key), fixed)
        return fields | {"rope_scaling_factor": float(number_of(rope, "factor"))}

    def rope_config(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """For transformers 5 and for earlier versions."""
        theta, factor = float(fields["rotary_base"]), fields["rope_scaling_factor"]
        scaled = None if factor is None else {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        part = {} if self.rotated is None else {"partial_rotary_factor": fields["rotary_percent"]}
        return {
            "rope_theta": theta,
            "rope_scaling": scaled,
            "rope_parameters": (scaled or {"rope_type": "default"}) | {"rope_theta": theta} | part,
        } | part


def layers_with_experts(fields: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it has experts, if the model has any."""
    every = fields["transformer"].get("moe_layer_freq", 1)
    layers = range(fields["num_layers"])
    return [layer % every == 0 for layer in layers] if isinstance(every, int) else [bool(one) for one in every]


def rope_kind(rope: Mapping[str, Any], keys: Mapping[str, Sequence[str]]) -> str:
    """Return the type of rotary positions, one of ``keys``, which has the keys that belong to each type.

    Raises:
        ConfigError: the type is another one, or a key does not belong to it.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in (*keys,):
        raise not_built("rope_type", kind, " or ".join(keys))
    for key, value in rope.items():
        if key not in keys[kind] and value is not None:
            raise not_built(f"rope_parameters.{key}", value, None)
    return str(kind)


def _dtype_of(source: Mapping[str, Any]) -> str:
    """From ``dtype`` (transformers 5) or ``torch_dtype`` (before)."""
    new, old = source.get("dtype"), source.get("torch_dtype")
    dtype = new or old or "float32"
    if dtype not in _DTYPES:
        raise not_built("dtype" if new else "torch_dtype", dtype, " or ".join(_DTYPES))
    return str(dtype)


def _merged_rope(source: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of rotary positions from all places, which must agree."""
    settings: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = source.get(key)
        if not isinstance(value, dict | None):
            raise not_built(key, value, "an object")
        for name, setting in (value or {}).items():
            if settings.setdefault(name, setting) != setting:
                raise not_built(key, value, source["rope_scaling"])
    for key in ("rope_theta", _PARTIAL):
        if key in source and settings.setdefault(key, source[key]) != source[key]:
            raise not_built(key, source[key], settings[key])
    return settings
