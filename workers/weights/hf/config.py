"""``config.json`` of a Hugging Face checkpoint as fields of ModelConfig, and back.

Read as JSON: transformers is not needed. A value with which Megatron's GPT would compute something else is rejected
with an error that names its key.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcontroller.errors import ConfigError
from workers.weights.hf import families  # noqa: F401  # registers them
from workers.weights.hf.family import MODEL_FAMILIES, ModelFamily, family_like
from workers.weights.hf.fields import ReadKeys
from workers.weights.hf.hub import local_directory

_LENGTH = "max_position_embeddings"
# Fields of ModelConfig -> the keys of config.json that have them, by the names of one family or another.
_SIZES: Mapping[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "max_sequence_length": (_LENGTH,),
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "ffn_hidden_size": ("intermediate_size",),
    "layernorm_epsilon": ("rms_norm_eps",),
    "num_moe_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
    "tie_embeddings": ("tie_word_embeddings",),
    "dtype": ("dtype", "torch_dtype"),
}


def has_bridge() -> bool:
    """Return whether Megatron-Bridge is installed, and Transformer Engine, which most of its models need."""
    return all(importlib.util.find_spec(name) is not None for name in ("transformer_engine", "megatron.bridge"))


def model_fields_from_hf(path: str | os.PathLike[str], provider: str = "native") -> dict[str, Any]:
    """Return the fields of ModelConfig that ``config.json`` in a directory determines.

    Args:
        path: the directory.
        provider: ``native`` or ``bridge``. For ``bridge``, which reads the file itself, the fields are sizes alone, for
            estimates and checks.

    Raises:
        ConfigError: no ``config.json``, no family is registered for its ``model_type``, or a key has a value with which
            the model would compute something else; ``key`` and ``value`` are from ``config.json``.
    """
    config = read_config(path)
    if provider == "bridge":
        return _sizes_of(config) | {"provider": provider, "hf_path": local_directory(path)}
    model_type = str(config.get("model_type"))
    if model_type not in MODEL_FAMILIES:
        if (factor := config.get("residual_multiplier", 1)) != 1:
            raise ConfigError(
                f"{Path(path) / 'config.json'}: residual_multiplier is {factor!r}; Megatron adds the output of a layer "
                f"to its input without a factor. Build the model in build_model of your worker (docs/own-megatron.md)",
                key="residual_multiplier",
                value=factor,
            )
        raise ConfigError(
            f"{Path(path) / 'config.json'}: model_type is {model_type!r}; registered are {', '.join(MODEL_FAMILIES)}. "
            "Set model.provider=bridge for a model of Megatron-Bridge, build the model in build_model of your worker "
            "(docs/own-megatron.md), or add a family with workers.register_model_family",
            key="model_type",
            value=model_type,
        )
    family, read = MODEL_FAMILIES[model_type], ReadKeys(config)
    fields = family.fields_from(read)
    family.check_keys(read)
    return fields | {"provider": provider, "family": model_type, "hf_path": local_directory(path)}


def _sizes_of(config: dict[str, Any]) -> dict[str, Any]:
    """The sizes in ``config.json`` of any family; of a model with images, those of its text."""
    source = config | (config.get("text_config") or {})
    fields = {
        name: next(source[key] for key in keys if source.get(key) is not None)
        for name, keys in _SIZES.items()
        if any(source.get(key) is not None for key in keys)
    }
    if "num_moe_experts" not in fields:
        fields.pop("moe_ffn_hidden_size", None)
    return fields


def describes_model(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory of this node has the config.json of a registered family."""
    return Path(path).is_dir() and family_at(path) is not None


def family_at(path: str | os.PathLike[str]) -> ModelFamily | None:
    """Return the family of the checkpoint in a directory; None without a config.json of a registered one."""
    return MODEL_FAMILIES.get(str(_config_at(path).get("model_type")))


def family_of(model: Any) -> ModelFamily:
    """Return ``family`` of a ``ModelConfig``, or without one the first registered family that is built like the model.

    Raises:
        ConfigError: there is none, or ``model.family`` does not describe the model.
    """
    return family_like(_fields(model))


def hf_config_of(model: Any, value_head: bool = False) -> dict[str, Any]:
    """Return ``config.json`` of the model's family; with a value head, of a classifier with one label.

    Keys that change no logits, such as the ids of special tokens, come from the checkpoint at ``model.hf_path``.

    Args:
        model: a ``ModelConfig``.
        value_head: whether the model ends in a value head.

    Raises:
        ConfigError: no family is built like the model; ``key`` and ``value`` name a field that differs.
    """
    if model.provider == "bridge":
        config = {key: value for key, value in read_config(str(model.hf_path)).items() if key != "quantization_config"}
        config |= {key: model.dtype for key in config.keys() & {"dtype", "torch_dtype"}}
        config["architectures"] = [
            architecture.replace("ForSequenceClassification", "ForCausalLM") for architecture in config["architectures"]
        ]
        prefix = config["architectures"][0].partition("For")[0]
    else:
        family = family_of(model)
        loaded = {} if model.hf_path is None else _config_at(model.hf_path)
        kept = family.inert_of(loaded)
        config = kept | {
            "architectures": [family.architecture + "ForCausalLM"],
            "model_type": family.model_type,
            **family.config_from(_fields(model)),
            **{key: kept[key] for key in kept.keys() & {"initializer_range"}},
        }
        if (length := loaded.get(_LENGTH)) is not None:  # sequences of a run may be shorter than the model allows
            config[_LENGTH] = max(length, config[_LENGTH])
        prefix = family.architecture
    if value_head:
        config["architectures"] = [prefix + "ForSequenceClassification"]
    return config | ({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if value_head else {})


def _fields(model: Any) -> dict[str, Any]:
    return {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}


def _config_at(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what ``read_config`` does; an empty mapping if the directory has no config.json."""
    return read_config(path) if (Path(path) / "config.json").is_file() else {}


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of ``config.json`` in a directory.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    file = Path(local_directory(path)) / "config.json"
    if not file.is_file():
        raise ConfigError(f"there is no config.json in {str(path)!r}", key="hf_path", value=str(path))
    return _read_object(file, path)


def stop_tokens_of(path: str | os.PathLike[str]) -> list[int]:
    """Return the tokens that end a response, from ``generation_config.json``; none if the directory has no such file.

    Raises:
        ConfigError: the file is damaged, or a token is no number.
    """
    file = Path(path) / "generation_config.json"
    ids = _read_object(file, path).get("eos_token_id") if file.is_file() else None
    tokens = ids if isinstance(ids, list) else [ids] if ids is not None else []
    if any(type(token) is not int or token < 0 for token in tokens):
        text = f"{file}: eos_token_id is {ids!r}; expected token ids"
        raise ConfigError(text, key="eos_token_id", value=ids)
    return tokens


def _read_object(file: Path, path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {error}", key="hf_path", value=str(path)) from error
    if not isinstance(content, dict):
        text = f"{file} is damaged: it contains {type(content).__name__}, expected an object"
        raise ConfigError(text, key="hf_path", value=str(path))
    return content
