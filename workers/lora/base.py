"""The base that an adapter was trained on, identified without reading all of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcontroller.errors import DataError
from workers.config.model import ModelConfig

_SAMPLE = 64
"""[bytes] Read at the start, in the middle and at the end of every tensor."""
_NOT_OF_BASE = ("lora", "freeze", "train_only", "hf_path", "dtype", "transformer_impl", "max_sequence_length")


def base_hash(model: ModelConfig) -> str:
    """Return a SHA-256 of the weights that a model starts from: the same for any division into files.

    It covers the name, dtype and shape of every tensor at ``model.hf_path``, and samples of its bytes. Without a
    checkpoint, it covers the sizes and the seed, from which the weights follow.

    Raises:
        DataError: a file is damaged.
    """
    digest = hashlib.sha256()
    if model.hf_path is None:
        fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
        kept = {name: value for name, value in fields.items() if name not in _NOT_OF_BASE}
        digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
        return digest.hexdigest()
    for name, header, file, start in sorted(tensor_headers(Path(model.hf_path)), key=lambda header: header[0]):
        begin, end = header["data_offsets"]
        digest.update(f"{name} {header['dtype']} {header['shape']}".encode())
        with open(file, "rb") as opened:
            for offset in (begin, (begin + end) // 2, max(begin, end - _SAMPLE)):
                opened.seek(start + offset)
                digest.update(opened.read(min(_SAMPLE, end - offset)))
    return digest.hexdigest()


def tensor_headers(directory: Path) -> Iterator[tuple[str, dict[str, Any], Path, int]]:
    """Iterate over the tensors in the safetensors of a directory: name, header, file, and where its data begin.

    Raises:
        DataError: a file is damaged.
    """
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with open(file, "rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                headers: Any = json.loads(opened.read(length) if length < file.stat().st_size else b"")
            for name, header in headers.items():
                if name != "__metadata__":
                    header["dtype"], header["shape"], sum(header["data_offsets"])
                    yield name, header, file, 8 + length
        except (ValueError, KeyError, TypeError, OSError, AttributeError, RecursionError) as error:
            raise DataError(f"{str(file)!r} is damaged: {error}", path=str(file)) from error
