"""Whether two configurations describe one model, as far as a pass without gradients computes it.

All fields are compared but the ones of ``workers.computed_fields`` that may differ.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.transformer import TransformerConfig

from workers.computed_fields import MAY_DIFFER, UNAVAILABLE, computed_fields
from workers.config import ModelConfig, ParallelConfig
from workers.model.transformer_config import transformer_config
from workers.weights.hf.config import read_config
from workers.weights.hf.fields import INERT

_OF_WEIGHTS = frozenset(
    ("dtype", "seed", "hf_path", "verify_load", "family", "lora", "freeze", "train_only", "hybrid_layer_pattern")
)
"""Fields of ModelConfig that say which weights there are, how they are trained, under which names they go, and which
class of Megatron's has them."""


def differing_fields(
    first: ModelConfig, second: ModelConfig, of_first: ParallelConfig, of_second: ParallelConfig
) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two models with the same weights compute something else, with both values.

    Args:
        first: a model.
        second: another.
        of_first: its axes.
        of_second: its axes.

    Returns:
        By field of ModelConfig, or ``transformer.<field>`` of TransformerConfig.

    Raises:
        ConfigError: a TransformerConfig cannot be built.
    """
    ours, theirs = _computed(first, of_first), _computed(second, of_second)
    pairs = {name: (ours.get(name), theirs.get(name)) for name in ours | theirs}
    return {name: (one, other) for name, (one, other) in pairs.items() if one != other}


def _computed(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    in_transformer = {field.name for field in dataclasses.fields(TransformerConfig)} | {"activation", "transformer"}
    values = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    if model.position_embedding_type != "learned_absolute":  # other positions have no last one
        del values["max_sequence_length"]
    beside = {name: value for name, value in values.items() if name not in in_transformer | _OF_WEIGHTS}
    if model.provider == "bridge":
        return beside | _of_bridge(model)
    kept = {name: value for name, value in model.transformer.items() if name not in UNAVAILABLE}
    config = transformer_config(dataclasses.replace(model, transformer=kept), parallel)
    built = computed_fields(config)
    keys = {name: name if name in values else f"transformer.{name}" for name in built} | {
        "activation_func": "activation"
    }
    return beside | {keys[name]: value for name, value in built.items()}


def _of_bridge(model: ModelConfig) -> dict[str, Any]:
    """What Megatron-Bridge builds a model from: a file, and the fields that replace what it says."""
    ignored = INERT | {"dtype", "torch_dtype", "quantization_config"}
    config = {key: value for key, value in read_config(str(model.hf_path)).items() if key not in ignored}
    fields = {key: value for key, value in model.transformer.items() if key not in MAY_DIFFER}
    return {f"config.json {key}": value for key, value in config.items() if key[0] != "_"} | {
        f"transformer.{key}": value for key, value in fields.items()
    }
