"""Whether two groups have the same policy: one model, as far as a pass without gradients computes it, and one sampling.

All fields of a model are compared but the ones of ``workers.computed_fields`` that may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.core.transformer import TransformerConfig

from mcontroller.errors import ConfigError
from workers.computed_fields import MAY_DIFFER, UNAVAILABLE, computed_fields
from workers.config import ActorConfig, ModelConfig, ParallelConfig
from workers.model.transformer_config import transformer_config
from workers.weights.hf.config import read_config
from workers.weights.hf.fields import INERT

_OF_WEIGHTS = frozenset(
    ("dtype", "seed", "hf_path", "verify_load", "family", "lora", "freeze", "train_only", "hybrid_layer_pattern")
)
"""Fields of ModelConfig that say which weights there are, how they are trained, under which names they go, and which
class of Megatron's has them."""


_OF_AN_ENGINE = ("max_rows", "engine", "vllm", "verify_weights")
"""Fields of RolloutConfig that only the group that generates reads."""


def check_same_policy(source: ActorConfig, target: ActorConfig) -> None:
    """Check that weights can go from groups of one configuration to groups of another, before any process starts.

    Raises:
        ConfigError: the models compute something else (see ``differing_fields``); the settings of generation differ;
            or only one of them has ``router_replay=rollout``.
    """
    _raise_differing("model", differing_fields(source.model, target.model, source.parallel, target.parallel))
    names = [field.name for field in dataclasses.fields(source.rollout) if field.name not in _OF_AN_ENGINE]
    sampling = {name: (getattr(source.rollout, name), getattr(target.rollout, name)) for name in names}
    _raise_differing("rollout", {name: pair for name, pair in sampling.items() if pair[0] != pair[1]})
    modes = source.router_replay, target.router_replay
    if "rollout" in modes and modes[0] != modes[1]:
        raise ConfigError(
            f"actor_rollout_ref.router_replay is {modes[0]!r}, and rollout.router_replay {modes[1]!r}: the actor "
            "replays what the rollout records; set both to the same value",
            key="rollout.router_replay",
            value=target.router_replay,
        )


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


def _raise_differing(section: str, differing: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise ConfigError for the first of the fields that differ."""
    for name, (ours, theirs) in sorted(differing.items()):
        raise ConfigError(
            f"rollout.{section}.{name} is {theirs!r}, and actor_rollout_ref.{section}.{name} is {ours!r}: both groups "
            "have the same policy, so set them to the same value",
            key=f"rollout.{section}.{name}",
            value=theirs,
            differing={f"{section}.{field}": pair for field, pair in differing.items()},
        )
