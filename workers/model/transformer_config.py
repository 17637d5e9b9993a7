"""Build Megatron's TransformerConfig from a ModelConfig and the sizes of the axes, with every field checked."""

from __future__ import annotations

import collections.abc
import difflib
import enum
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import activations
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from mcontroller.errors import ConfigError
from parallel_state.releases import language_models, release
from workers.config import ModelConfig, ParallelConfig
from workers.config.fit import check_fit
from workers.model.gpu_defaults import gpu_defaults

_DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": activations.fast_gelu,
    "relu": torch.nn.functional.relu,
    "squared_relu": activations.squared_relu,
    "quick_gelu": activations.quick_gelu,
}
_OF_LAYERS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
)
SAME_NAME = (*_OF_LAYERS, "attention_dropout", "hidden_dropout", "init_method_std")
"""The fields that ModelConfig and Megatron's TransformerConfig have under the same name, of models without experts."""
# Fields that a model which was built elsewhere must have in common with the configuration: they are exported, or decide
# how ranks divide the model and communicate. The first ones are compared on TransformerConfig, the others on GPTModel.
_ARCHITECTURE = (*_OF_LAYERS, "activation_func", "num_moe_experts", "params_dtype")
_POSITIONS = ("position_embedding_type", "rotary_base", "rotary_percent")
# Defaults that differ from Megatron's; a user may set other values.
_CHANGEABLE = frozenset(
    (
        "moe_token_dispatcher_type",
        "moe_grouped_gemm",
        "gradient_accumulation_fusion",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "deallocate_pipeline_outputs",
    )
)


def transformer_config(model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """Return the TransformerConfig of the model on these axes; needs no process group.

    With ``model.transformer.multi_latent_attention`` it is an MLATransformerConfig.

    Args:
        model: the model; ``model.transformer`` has other fields of TransformerConfig.
        parallel: the sizes of the axes.

    Raises:
        ConfigError: sizes do not fit the axes; in ``model.transformer`` a field is unknown, follows from other fields
            of the configuration, or has a value of another type; TransformerConfig itself rejects the model.
    """
    kind, fields, extra = given_fields(model, parallel)
    fields |= gpu_defaults(model)
    # Megatron computes a softmax over one chosen expert, but its check rejects it: the router is not trained then.
    chosen_only = model.moe_router_topk == 1 and extra.get("moe_router_pre_softmax") is False
    try:
        config = kind(**(fields | extra | ({"moe_router_pre_softmax": True} if chosen_only else {})))
    except (AssertionError, ImportError, ValueError) as error:
        raise ConfigError(f"TransformerConfig rejects the model: {error}", key="model", value=model) from error
    if chosen_only:
        config.moe_router_pre_softmax = False
    return config


def given_fields(
    model: ModelConfig, parallel: ParallelConfig
) -> tuple[type[TransformerConfig], dict[str, Any], dict[str, Any]]:
    """Return the class of the configuration, the fields that follow from others, and those of ``model.transformer``.

    Raises:
        ConfigError: see ``transformer_config``; what the machine's GPU decides is not checked.
    """
    check_fit(model, parallel)
    if model.hybrid_layer_pattern is not None and len(language_models()) == 1:
        raise ConfigError(
            f"model.hybrid_layer_pattern builds a HybridModel, which megatron-core {release()} does not have: install "
            "0.19 or later, which needs Python 3.12 (docs/index.md), or leave the pattern out for a GPTModel",
            key="model.hybrid_layer_pattern",
            value=model.hybrid_layer_pattern,
        )
    fields = _from_model(model) | parallel_fields(parallel)
    kind: type[TransformerConfig] = TransformerConfig
    given = dict(model.transformer)
    if given.get("multi_latent_attention"):
        kind = MLATransformerConfig
        fields |= {"rotary_base": model.rotary_base, "rotary_percent": model.rotary_percent}
        fields["num_query_groups"] = model.num_attention_heads  # every head has keys, also in Megatron's cache
        if given.get("q_lora_rank", 0) is None:  # Megatron's class has no annotation for queries without compression
            fields["q_lora_rank"] = given.pop("q_lora_rank")
    given.pop("mtp_num_layers", None)  # built beside the model: workers.model.token_prediction
    set_elsewhere = dict.fromkeys(fields.keys() - _CHANGEABLE, "model.* and parallel.*")
    return kind, fields, checked_fields(kind, given, "model.transformer", set_elsewhere)


def _from_model(model: ModelConfig) -> dict[str, Any]:
    dtype = getattr(torch, model.dtype)
    fields = {name: getattr(model, name) for name in SAME_NAME}
    fields |= {
        "activation_func": ACTIVATIONS[model.activation],
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "use_cpu_initialization": False,  # each rank fills its own shards, and ``initialize_weights`` fills them again
        "moe_token_dispatcher_type": "alltoall",  # also required for lengths that vary over pp, in dense models too
        "gradient_accumulation_fusion": not torch.cuda.is_available(),  # on a GPU: ``gpu_defaults``
    }
    if model.has_states:
        fields["is_hybrid_model"] = True
    if model.num_moe_experts is not None:
        fields |= {
            "num_moe_experts": model.num_moe_experts,
            "moe_router_topk": model.moe_router_topk,
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
            "moe_grouped_gemm": True,
        }
    return fields


def parallel_fields(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the fields of TransformerConfig that follow from the axes."""
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "sequence_parallel": parallel.sequence_parallel,
        # If pp is 2, interleaved stages send both ways between the same two ranks: one by one, never as a batch.
        "overlap_p2p_comm": parallel.vpp is not None,
        "batch_p2p_comm": parallel.vpp is None,
        # What a stage has sent is needed for its backward function only: freed, as Megatron-LM always does.
        "deallocate_pipeline_outputs": parallel.pp > 1,
    }


def check_chunks(chunks: Sequence[Any], model: ModelConfig, parallel: ParallelConfig, owner: str) -> None:
    """Check that model chunks match the configuration, which ranks, checkpoints and exports rely on.

    Chunks without a TransformerConfig of Megatron's are not checked.

    Args:
        chunks: the model chunks of this rank.
        model: the model, as it is configured.
        parallel: the sizes of the axes, as they are configured.
        owner: what built the chunks, for the message.

    Raises:
        ConfigError: fields differ; ``differing`` has (the chunk's value, the configured value) by name.
    """
    expected = transformer_config(model, parallel)
    differing: dict[str, tuple[Any, Any]] = {}
    for chunk in chunks:
        config = getattr(chunk, "config", None)
        if not isinstance(config, TransformerConfig):
            continue
        dense = config.num_moe_experts is None and expected.num_moe_experts is None
        for name in (*_ARCHITECTURE, *(name for name in parallel_fields(parallel) if name not in _CHANGEABLE)):
            unnamed = name == "activation_func" and config.activation_func not in ACTIVATIONS.values()
            latent = name in ("num_query_groups", "kv_channels") and config.multi_latent_attention
            if not (unnamed or latent or (dense and name == "expert_tensor_parallel_size")):
                _compare(differing, name, getattr(config, name), getattr(expected, name))
        rotary = getattr(chunk, "position_embedding_type", None) == "rope"
        for name in _POSITIONS if rotary else _POSITIONS[:1]:
            if hasattr(chunk, name):
                _compare(differing, name, getattr(chunk, name), getattr(model, name))
    if differing:
        listed = ", ".join(f"{name} is {built!r}, not {wanted!r}" for name, (built, wanted) in differing.items())
        raise ConfigError(
            f"the model that {owner} returned differs from the configuration: {listed}. Change one of the two; "
            "ParallelConfig.from_megatron_args and workers.model_config_from_megatron read both from Megatron's",
            key="model",
            differing=differing,
        )


def _compare(differing: dict[str, tuple[Any, Any]], name: str, built: Any, wanted: Any) -> None:
    same = built is wanted if callable(wanted) else built == wanted
    if not same:
        differing[name] = (built, wanted)


def checked_fields(
    kind: type, values: Mapping[str, Any], at: str, set_elsewhere: Mapping[str, str] = types.MappingProxyType({})
) -> dict[str, Any]:
    """Return the fields of a configuration class of Megatron, checked and converted to its annotations.

    Args:
        kind: the class, as the installed release of megatron-core has it.
        values: by the names of its fields, as configuration files have them.
        at: the key of the values in the configuration.
        set_elsewhere: by name of a field that has another key in the configuration, that key.

    Raises:
        ConfigError: a field is unknown, is set elsewhere, or has a value of another type; ``key`` names it.
    """
    hints = _annotations(kind)
    fields: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{at}.{name}"
        if name not in hints:
            close = difflib.get_close_matches(name, hints, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            text = f"{key}: megatron-core's {kind.__name__} has no such field{hint}"
            raise ConfigError(text, key=key, value=value, close_matches=close)
        if name in set_elsewhere:
            raise ConfigError(f"{key} follows from {set_elsewhere[name]}: set it there", key=key, value=value)
        try:
            fields[name] = coerced(value, hints[name])
        except TypeError as error:
            raise ConfigError(f"{key} is {value!r}; {kind.__name__} expects {error}", key=key, value=value) from error
    return fields


@functools.cache  # milliseconds for the hundreds of fields of a TransformerConfig
def _annotations(kind: type) -> dict[str, Any]:
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if not name.startswith("_")}


def coerced(value: Any, hint: Any) -> Any:
    """Return ``value`` converted to the annotation ``hint``: names to enum members or dtypes, lists to tuples.

    Args:
        value: as configuration files have it.
        hint: an annotation of a field of Megatron's configuration classes.

    Raises:
        TypeError: the value is of another type; the message is the text of the annotation.
    """
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _first_match(value, options, hint)
    if origin is typing.Literal:
        return _accept(value, value in options, hint)
    if origin is list or hint is list:
        items = _accept(value, isinstance(value, list | tuple), hint)
        return [coerced(item, options[0]) for item in items] if options else list(items)
    if origin is tuple:
        items = _accept(value, isinstance(value, list | tuple) and len(value) == len(options), hint)
        return tuple(coerced(item, option) for item, option in zip(items, options, strict=True))
    if hint is collections.abc.Callable or origin is collections.abc.Callable or hint is typing.Callable:
        return _accept(value, callable(value), hint)
    if hint is torch.dtype and isinstance(value, str):
        return getattr(torch, _accept(value, value in _DTYPES, hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum) and isinstance(value, str):
        return hint[_accept(value, value in hint.__members__, hint)]
    if hint is float and type(value) is int:
        return float(value)
    if hint is int:
        return _accept(value, type(value) is int, hint)
    return _accept(value, isinstance(value, origin or hint), hint)


def _first_match(value: Any, options: tuple[Any, ...], hint: Any) -> Any:
    for option in options:
        try:
            return coerced(value, option)
        except TypeError:
            continue
    raise TypeError(_described(hint))


def _accept(value: Any, is_valid: bool, hint: Any) -> Any:
    if not is_valid:
        raise TypeError(_described(hint))
    return value


def _described(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return f"one of {', '.join(hint.__members__)}"
    if hint is torch.dtype:
        return f"one of {', '.join(_DTYPES)}"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
