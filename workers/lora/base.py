"""The base that an adapter was trained on, identified without reading all of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from workers.computed_fields import initial_fields
from workers.config.model import ModelConfig
from workers.weights.hf.files import open_safetensors, weight_paths
from workers.weights.hf.hub import local_directory

_SAMPLES = 3
"""Rows that are read of every tensor: the first, one in the middle, and the last."""


def base_hash(model: ModelConfig) -> str:
    """Return a SHA-256 of the weights that a model starts from: the same for any division into files.

    It covers the name, dtype and shape of every tensor at ``model.hf_path``, and some of its rows. Without a
    checkpoint, it covers the fields that the weights and what they compute follow from.

    Raises:
        DataError: a file is damaged.
    """
    digest = hashlib.sha256()
    if model.hf_path is None:
        digest.update(json.dumps(initial_fields(model), sort_keys=True, default=str).encode())
        return digest.hexdigest()
    files = [open_safetensors(path) for path in weight_paths(Path(local_directory(model.hf_path)))]
    tensors = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping
    for name, tensor in sorted(tensors.items()):
        shape = tensor.get_shape()
        digest.update(f"{name} {tensor.get_dtype()} {shape}".encode())
        for part in range(_SAMPLES):
            row = tuple(slice(at, at + 1) for at in [(size - 1) * part // (_SAMPLES - 1) for size in shape[:-1]])
            digest.update(tensor[row or ...].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
