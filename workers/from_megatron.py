"""ModelConfig from what a team's Megatron code has: Megatron-LM's arguments, or a TransformerConfig.

A model that is written down twice may differ, and then something else is trained or exported than the team believes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.core.transformer import TransformerConfig

from mcontroller.errors import ConfigError
from workers.computed_fields import computed_fields
from workers.config.model import ModelConfig
from workers.config.parallel import ParallelConfig
from workers.model.transformer_config import ACTIVATIONS, SAME_NAME, transformer_config

_ACTIVATIONS = {function.__name__: name for name, function in ACTIVATIONS.items()}
"""Name of an activation function of torch or Megatron -> name in ``ModelConfig``."""

# Arguments that change what is computed beside those that are fields of TransformerConfig: name -> the values at which
# they change nothing.
_OF_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "heterogeneous_layers_config_path": (None,),
    "apply_layernorm_1p": (False, None),
    "rotary_seq_len_interpolation_factor": (1, None),
}
# Fields of TransformerConfig with which Megatron-LM's training loop runs, and this project does in its own way.
_OF_TRAINING_LOOP = frozenset(
    (
        "config_logger_dir",
        "cross_entropy_fusion_impl",
        "cross_entropy_loss_fusion",
        "cuda_graph_impl",
        "cuda_graph_retain_backward_graph",
        "cuda_graph_scope",
        "cuda_graph_use_single_mempool",
        "cuda_graph_warmup_steps",
        "defer_embedding_wgrad_compute",
        "enable_cuda_graph",
        "external_cuda_graph",
        "fine_grained_activation_offloading",
        "flash_decode",
        "hybrid_context_parallel",
        "inference_rng_tracker",
        "inference_sampling_seed",
        "init_model_with_meta_device",
        "log_max_attention_logit",
        "moe_enable_routing_replay",
        "overlap_moe_expert_parallel_comm",
        "perform_initialization",
        "tp_comm_overlap",
        "use_te_rng_tracker",
    )
)


def model_config_from_megatron(
    source: Any, *, vocab_size: int | None = None, max_sequence_length: int | None = None, **changes: Any
) -> ModelConfig:
    """Return the model that Megatron-LM's arguments or a TransformerConfig describe.

    A TransformerConfig does not have what belongs to the embeddings and the output: pass ``position_embedding_type``,
    ``rotary_base``, ``rotary_percent``, ``rope_scaling_factor`` and ``tie_embeddings`` where they are not the
    defaults.

    Args:
        source: the arguments after ``validate_args``, or the configuration.
        vocab_size: tokens without padding. None: the arguments' ``vocab_size``.
        max_sequence_length: longest sequence. None: the arguments' ``max_position_embeddings``.
        changes: fields of ``ModelConfig`` that differ.

    Raises:
        ConfigError: the source has no ``vocab_size`` or length, and none is passed; or a field that changes what is
            computed and that ``ModelConfig`` does not have. Names the field.
    """
    fields: dict[str, Any] = {name: getattr(source, name) for name in SAME_NAME if hasattr(source, name)}
    fields |= _normalization(source) | _activation(source) | _embeddings(source) | _experts(source) | _pattern(source)
    fields["dtype"] = _dtype(source)
    fields["num_query_groups"] = _value(source, "num_query_groups") if _is_grouped(source) else None
    fields["vocab_size"] = vocab_size if vocab_size is not None else _value(source, "vocab_size")
    lengths = (max_sequence_length, _value(source, "max_position_embeddings"), _value(source, "seq_length"))
    fields["max_sequence_length"] = next((length for length in lengths if length is not None), None)
    fields |= changes
    for name in ("vocab_size", "max_sequence_length"):
        if fields[name] is None:
            text = f"{type(source).__name__} has no {name}: pass {name}="
            raise ConfigError(text, key=f"model.{name}", value=None)
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    model = ModelConfig(**{name: value for name, value in fields.items() if name in known})
    _check_computed(source, model, changes)
    return model


def _value(source: Any, name: str, default: Any = None) -> Any:
    value = getattr(source, name, None)
    return default if value is None else value


def _is_grouped(source: Any) -> bool:
    """Whether attention has fewer key-value heads; Megatron-LM's arguments have a number even if it is not used."""
    groups = _value(source, "num_query_groups")
    return bool(_value(source, "group_query_attention", groups != _value(source, "num_attention_heads")))


def _normalization(source: Any) -> dict[str, Any]:
    epsilon = _value(source, "layernorm_epsilon", _value(source, "norm_epsilon"))
    return {} if epsilon is None else {"layernorm_epsilon": epsilon}


def _activation(source: Any) -> dict[str, Any]:
    function = _value(source, "activation_func")
    if function is not None:  # a TransformerConfig
        name = getattr(function, "__name__", repr(function))
        if name not in _ACTIVATIONS:
            text = f"activation_func is {name}; ModelConfig has {', '.join(_ACTIVATIONS.values())}"
            raise ConfigError(text, key="model.activation", value=name)
        return {"activation": _ACTIVATIONS[name], "gated_linear_unit": bool(source.gated_linear_unit)}
    if _value(source, "swiglu", False):
        return {"activation": "silu", "gated_linear_unit": True}
    if _value(source, "quick_geglu", False):
        return {"activation": "quick_gelu", "gated_linear_unit": True}
    gelu = "gelu_tanh" if _value(source, "bias_gelu_fusion", False) else "gelu"  # the kernel computes that one
    return {"activation": "squared_relu" if _value(source, "squared_relu", False) else gelu, "gated_linear_unit": False}


def _embeddings(source: Any) -> dict[str, Any]:
    position = _value(source, "position_embedding_type")
    names = ("position_embedding_type", "rotary_base", "rotary_percent")  # arguments have a base without rotation too
    of_position = names if position in (None, "rope") else names[:1]
    fields = {name: getattr(source, name) for name in of_position if _value(source, name) is not None}
    if hasattr(source, "untie_embeddings_and_output_weights"):
        fields["tie_embeddings"] = not source.untie_embeddings_and_output_weights
    if _value(source, "use_rope_scaling", False) and position in (None, "rope"):
        fields["rope_scaling_factor"] = _value(source, "rope_scaling_factor", 8.0)
    return fields


def _experts(source: Any) -> dict[str, Any]:
    experts = _value(source, "num_moe_experts", _value(source, "num_experts"))
    if experts is None:  # arguments have a width and a number of chosen experts without experts too
        return {}
    names = [name for name in ("moe_router_topk", "moe_ffn_hidden_size") if hasattr(source, name)]
    return {"num_moe_experts": experts} | {name: getattr(source, name) for name in names}


def _pattern(source: Any) -> dict[str, Any]:
    """Return the pattern of a HybridModel, and its layers: two letters each, or one beside Mamba layers."""
    pattern = _value(source, "hybrid_layer_pattern")
    if pattern is None:
        return {}
    letters = len(pattern.partition("/")[0].replace("|", ""))
    return {"hybrid_layer_pattern": pattern, "num_layers": letters if "M" in pattern else letters // 2}


def _dtype(source: Any) -> str:
    """Return the dtype of the parameters, which the flags of mixed precision name too."""
    for flag, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        if _value(source, flag, False):
            return name
    return str(_value(source, "params_dtype", "float32")).removeprefix("torch.")


def _check_computed(source: Any, model: ModelConfig, changes: Mapping[str, Any]) -> None:
    """Raise ConfigError if a field of the source that enters the computation has another value in the model.

    None and False among arguments are options that were not given.
    """
    of_model = {"activation_func", "num_moe_experts"} | changes.keys()
    if model.hybrid_layer_pattern is not None:
        of_model |= {"num_layers"}  # of the source: letters
    built = computed_fields(transformer_config(model, ParallelConfig()))
    built["mtp_num_layers"] = model.transformer.get("mtp_num_layers")
    if model.num_moe_experts is None:
        of_model |= {name for name in built if name.startswith("moe_")}
    is_config = isinstance(source, TransformerConfig)
    theirs = computed_fields(source) if is_config else {name: getattr(source, name, None) for name in built}
    expected = {name: (built.get(name),) if is_config else (built[name], None, False) for name in theirs}
    if not is_config:
        expected |= _OF_ARGUMENTS
        theirs |= {name: getattr(source, name, None) for name in _OF_ARGUMENTS}
        theirs["num_query_groups"] = built["num_query_groups"]  # a number even if attention is not grouped
    for name, value in theirs.items():
        if name not in of_model | _OF_TRAINING_LOOP and value not in expected[name]:
            raise ConfigError(
                f"{name} is {value!r}, and of the ModelConfig {expected[name][0]!r}: pass "
                f"transformer={{{name!r}: ...}}, or build the model in an override of build_model",
                key=f"model.{name}",
                value=value,
            )
