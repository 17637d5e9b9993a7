"""``config.json`` of a Hugging Face checkpoint as a ModelConfig, and back.

Read as JSON: transformers is not needed. A value with which Megatron's GPT would compute something else is rejected
with an error that names its key.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from mcontroller.errors import ConfigError
from workers.config import ModelConfig
from workers.weights.hf import families  # noqa: F401  # registers them
from workers.weights.hf.family import MODEL_FAMILIES, ModelFamily, family_like

__all__ = ["family_at", "family_of", "hf_config_of", "model_config_from_hf", "model_fields_from_hf"]


def model_config_from_hf(path: str | os.PathLike[str], **changes: Any) -> ModelConfig:
    """Return the model in a Hugging Face directory, to be started from its weights.

    Its ``hf_path`` is ``path``; without weights: ``dataclasses.replace(config, hf_path=None)``.

    Args:
        path: a directory with the ``config.json`` of a registered family: Llama, Qwen2, Qwen2.5, Qwen3, Qwen3-MoE, or
            one of ``register_model_family``.
        changes: fields of ModelConfig with other values; ``dtype`` is the checkpoint's unless it is among them.

    Raises:
        ConfigError: no config.json, another family, or a key whose value changes what is computed and is not built;
            ``key`` and ``value`` are those of ``config.json``.
    """
    fields = model_fields_from_hf(path)
    transformer = fields.pop("transformer", {}) | changes.pop("transformer", {})
    return dataclasses.replace(ModelConfig(**fields, transformer=transformer), **changes)


def model_fields_from_hf(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of ModelConfig that the directory determines.

    Raises:
        ConfigError: as ``model_config_from_hf``.
    """
    config = _read_config(path)
    model_type = str(config.get("model_type"))
    if model_type not in MODEL_FAMILIES:
        raise ConfigError(
            f"{Path(path) / 'config.json'}: model_type is {model_type!r}; registered are {', '.join(MODEL_FAMILIES)} "
            "(workers.register_model_family adds one)",
            key="model_type",
            value=model_type,
        )
    return MODEL_FAMILIES[model_type].fields_from(config) | {"family": model_type, "hf_path": str(path)}


def family_at(path: str | os.PathLike[str]) -> ModelFamily | None:
    """Return the family of the checkpoint in a directory; None without a config.json of a registered one."""
    if not (Path(path) / "config.json").is_file():
        return None
    return MODEL_FAMILIES.get(str(_read_config(path).get("model_type")))


def family_of(model: ModelConfig) -> ModelFamily:
    """Return ``model.family``, or without one the first registered family that is built like the model.

    Raises:
        ConfigError: there is none, or ``model.family`` is built otherwise.
    """
    return family_like(_fields(model))


def hf_config_of(model: ModelConfig, value_head: bool = False) -> dict[str, Any]:
    """Return ``config.json`` of the model, of its own family; with a value head, of a classifier with one label.

    Raises:
        ConfigError: no family is built like this; ``key`` and ``value`` are the field that none has.
    """
    family = family_of(model)
    config = {
        "architectures": [family.architecture + ("ForSequenceClassification" if value_head else "ForCausalLM")],
        "model_type": family.model_type,
        **family.config_from(_fields(model)),
    }
    return config | ({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if value_head else {})


def _fields(model: ModelConfig) -> dict[str, Any]:
    return {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}


def _read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"there is no config.json in {str(path)!r}", key="hf_path", value=str(path))
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is damaged: {error}", key="hf_path", value=str(path)) from error
    return config
