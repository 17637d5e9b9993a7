"""``config.json`` of a Hugging Face checkpoint as a ModelConfig, and back.

Read as JSON: transformers is not needed. What Megatron's GPT would compute differently is refused by its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcontroller.errors import ConfigError
from workers.config.choices import DTYPES

__all__ = ["hf_config_of", "model_fields_from_hf"]

# What a family's configuration class supplies where config.json leaves a key out.
_COMMON = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False}
_MOE = {
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "qwen2": _COMMON,
    "qwen3": _COMMON | {"head_dim": 128},
    "qwen3_moe": _COMMON | _MOE,
}
_ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
# Keys whose other values change what the model computes in a way that is not built here.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "pretraining_tp": (1, None),
}
# What no family supplies.
_SIZES = (
    "vocab_size",
    "max_position_embeddings",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
)
# The one scaling of rotary positions that Megatron has, with the three numbers that it has fixed.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def model_fields_from_hf(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of ModelConfig that the directory's ``config.json`` determines.

    Raises:
        ConfigError: no ``config.json``, an unsupported family, or a key whose value changes the computation and is
            not supported; ``key`` and ``value`` name it.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"there is no config.json in {str(path)!r}", key="hf_path", value=str(path))
    try:
        given: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is damaged: {error}", key="hf_path", value=str(path)) from error
    family = given.get("model_type")
    if family not in _FAMILIES:
        possible = ", ".join(_FAMILIES)
        raise ConfigError(f"{file}: model_type is {family!r}; possible: {possible}", key="model_type", value=family)
    source = _FAMILIES[family] | given
    missing = [key for key in _SIZES if source.get(key) is None]
    if missing:
        raise ConfigError(f"{file} does not say {', '.join(missing)}", key=missing[0], value=None)
    for key, possible_values in _ONLY.items():
        if source.get(key) not in possible_values:
            raise _not_built(key, source[key], possible_values[0])
    if "sliding_attention" in (source.get("layer_types") or ()):
        raise _not_built("layer_types", source["layer_types"], "full_attention throughout")
    fields = _dense_fields(source, family) | _rope_fields(source) | {"hf_path": str(path)}
    if family == "qwen3_moe":
        fields |= _expert_fields(source)
    return fields


def _dense_fields(source: Mapping[str, Any], family: str) -> dict[str, Any]:
    dtype = source.get("dtype") or source.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise _not_built("dtype", dtype, " or ".join(DTYPES))
    return {
        "vocab_size": source["vocab_size"],
        "max_sequence_length": source["max_position_embeddings"],
        "num_layers": source["num_hidden_layers"],
        "hidden_size": source["hidden_size"],
        "num_attention_heads": source["num_attention_heads"],
        "num_query_groups": source.get("num_key_value_heads") or source["num_attention_heads"],
        "ffn_hidden_size": source["intermediate_size"],
        "kv_channels": source.get("head_dim") or source["hidden_size"] // source["num_attention_heads"],
        "layernorm_epsilon": source["rms_norm_eps"],
        "add_qkv_bias": family == "qwen2",
        "qk_layernorm": family.startswith("qwen3"),
        "tie_embeddings": source["tie_word_embeddings"],
        "dtype": dtype,
    }


def _rope_fields(source: Mapping[str, Any]) -> dict[str, Any]:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    rope: dict[str, Any] = source.get("rope_parameters") or source.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or source.get("rope_theta") or 10000
    if theta != int(theta):
        raise _not_built("rope_theta", theta, "a whole number")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _not_built("partial_rotary_factor", rope["partial_rotary_factor"], 1.0)
    fields: dict[str, Any] = {"rotary_base": int(theta)}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return fields
    if kind != "llama3":
        raise _not_built("rope_type", kind, "default or llama3")
    for key, fixed in _LLAMA3.items():
        if rope.get(key) != fixed:
            raise _not_built(key, rope.get(key), fixed)
    if "factor" not in rope:
        raise _not_built("factor", None, "a number")
    return fields | {"rope_scaling_factor": float(rope["factor"])}


def _expert_fields(source: Mapping[str, Any]) -> dict[str, Any]:
    dense = source.get("mlp_only_layers") or ()
    every = source["decoder_sparse_step"]
    with_experts = [
        int(layer not in dense and (layer + 1) % every == 0) for layer in range(source["num_hidden_layers"])
    ]
    return {
        # Called so since transformers 5, and num_experts before.
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


def _not_built(key: str, value: Any, built: Any) -> ConfigError:
    return ConfigError(f"config.json: {key} is {value!r}; built is {built!r} only", key=key, value=value)


# ---- back ------------------------------------------------------------------------------------------------------------

# Fields of ``ModelConfig`` and of ``ModelConfig.transformer`` that these families cannot express otherwise.
_EXPRESSIBLE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation": "silu",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
}
_EXPRESSIBLE_FURTHER: dict[str, Any] = {
    "activation_func_clamp_value": None,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "glu_linear_offset": 0.0,
    "layernorm_zero_centered_gamma": False,
    "moe_apply_probs_on_input": False,
    "moe_router_num_groups": None,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "no_rope_freq": None,
    "qk_l2_norm": False,
    "rotary_interleaved": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "use_mup": False,
    "window_size": None,
}


def hf_config_of(model: Any, value_head: bool = False) -> dict[str, Any]:
    """``config.json`` of the family that the model belongs to; with a value head, of a classifier with one label.

    Raises:
        ConfigError: no family is built like this; ``key`` and ``value`` say what none has.
    """
    family = _family(model)
    for key, value in _EXPRESSIBLE.items():
        if getattr(model, key) != value:
            raise _not_expressible(f"model.{key}", getattr(model, key), value)
    for key, value in _EXPRESSIBLE_FURTHER.items():
        if model.transformer.get(key, value) != value:
            raise _not_expressible(f"model.transformer.{key}", model.transformer[key], value)
    head_dim = model.kv_channels or model.hidden_size // model.num_attention_heads
    task = "ForSequenceClassification" if value_head else "ForCausalLM"
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family] + task],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_sequence_length,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size or 4 * model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups or model.num_attention_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.layernorm_epsilon,
        "attention_bias": family == "qwen2",
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_method_std,
        "dtype": model.dtype,
        "torch_dtype": model.dtype,
    }
    if family == "qwen2":
        del config["attention_bias"]  # always there, and no key of its configuration
    if value_head:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config | _rope_of(model) | (_experts_of(model) if family == "qwen3_moe" else {})


def _family(model: Any) -> str:
    if model.qk_layernorm and model.add_qkv_bias:
        raise _not_expressible("model.add_qkv_bias", True, "False with model.qk_layernorm")
    if model.num_moe_experts is not None:
        if not model.qk_layernorm:
            raise _not_expressible("model.qk_layernorm", False, "True with experts")
        return "qwen3_moe"
    if model.qk_layernorm:
        return "qwen3"
    return "qwen2" if model.add_qkv_bias else "llama"


def _rope_of(model: Any) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling_factor is not None:
        scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
    return {
        "rope_theta": float(model.rotary_base),
        "rope_scaling": scaling if model.rope_scaling_factor is not None else None,
        "rope_parameters": scaling | {"rope_theta": float(model.rotary_base)},
    }


def _experts_of(model: Any) -> dict[str, Any]:
    every = model.transformer.get("moe_layer_freq", 1)
    layers = range(model.num_layers)
    with_experts = [layer % every == 0 for layer in layers] if isinstance(every, int) else every
    return {
        "num_experts": model.num_moe_experts,
        "num_local_experts": model.num_moe_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * model.hidden_size,
        "norm_topk_prob": not model.transformer.get("moe_router_pre_softmax", False),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in layers if not with_experts[layer]],
    }


def _not_expressible(key: str, value: Any, expressible: Any) -> ConfigError:
    return ConfigError(
        f"{key} is {value!r}: a config.json of {', '.join(_FAMILIES)} can say {expressible!r} only",
        key=key,
        value=value,
    )
