"""ModelConfig of a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from workers.config.model import ModelConfig, automatic_provider
from workers.weights.hf.config import model_fields_from_hf


def model_config_from_hf(path: str | os.PathLike[str], **changes: Any) -> ModelConfig:
    """Return the model in a directory in Hugging Face's format, with ``hf_path`` set so that its weights are loaded.

    For random weights: ``dataclasses.replace(config, hf_path=None)``.

    Args:
        path: a directory with a ``config.json`` of a supported model family.
        changes: fields of ModelConfig that replace the checkpoint's. Without ``provider``, it is that of
            ``model.provider=auto``.

    Raises:
        ConfigError: no ``config.json``, an unsupported family, or a key whose value changes the computation and is
            not supported; ``key`` and ``value`` name it.

    Examples:
        >>> model_config_from_hf("/models/Qwen3-0.6B", dtype="bfloat16")
    """
    provider = changes.pop("provider", "auto")
    if provider == "auto":
        provider = automatic_provider({"hf_path": path, **changes})
    fields = model_fields_from_hf(path, provider)
    transformer = fields.pop("transformer", {}) | changes.pop("transformer", {})
    return dataclasses.replace(ModelConfig(**fields, transformer=transformer), **changes)
