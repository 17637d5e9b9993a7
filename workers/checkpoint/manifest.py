"""The manifest of a checkpoint, and where to find it: ``save`` writes checkpoints, ``load`` reads them.

The manifest is a JSON file with the step, layout, parts, counters, and the checksums of the other files. Names and
shapes of the tensors are in ``.metadata``, torch's description.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from mcontroller.errors import DataError
from mcontroller.files import partial_path, replace_text

MANIFEST = "manifest.json"
FORMAT = 4
METADATA = ".metadata"
"""The description of a distributed checkpoint by torch, in Megatron-LM's too."""
Buckets = Mapping[str, list[list[Any]]]
"""By optimizer and model-parallel rank, for each buffer its dtypes and the elements of its buckets."""

STEP = "global_step_{}"
"""The name of the directory of a checkpoint."""
LATEST = "latest"
"""The file with the name of the newest checkpoint beside it."""


class FileEntry(TypedDict):
    """A file of a checkpoint in its manifest."""

    size: int
    """[bytes] Its length."""
    sha256: str
    """Its SHA-256, in hexadecimal: the one that ``sha256sum`` prints."""


class Manifest(TypedDict):
    """The description of a checkpoint, in the file ``manifest.json`` of its directory."""

    format: int
    """Version of this description, ``FORMAT``."""
    step: int
    """The step that it was saved at."""
    layout: dict[str, Any] | None
    """World size, and size and order of the axes; None if unknown."""
    parts: list[str]
    """The parts that it has, of "model", "reference" and "optimizer"."""
    distributed_optimizer: bool
    """Whether the state was saved by a distributed optimizer."""
    optimizer_buckets: Buckets | None
    """The buckets that its state was saved in; None if it was saved by weights, which any layout loads."""
    scheduler_steps: int
    """Steps of the learning-rate schedule so far."""
    counters: dict[str, Any]
    """Counters of the worker, see ``TrainingState``; empty if unknown."""
    vocab_size: int | None
    """The size of the vocabulary without padding; None if the model has none."""
    base: NotRequired[dict[str, Any] | None]
    """If the weights are of adapters: path and SHA-256 of the base, and the factor of the adapters; else None."""
    function: NotRequired[dict[str, Any]]
    """Fields with which weights of the same shapes compute something else, see ``function_of``; missing if unknown."""
    files: dict[str, FileEntry]
    """The other files of the directory, with their lengths and checksums; empty if unknown."""


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest of the checkpoint in this directory, with a checksum of itself.

    Raises:
        OSError: it cannot be written.
    """
    replace_text(checkpoint / MANIFEST, json.dumps({**manifest, "sha256": _checksum(manifest)}, indent=1))


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of the checkpoint in this directory.

    Raises:
        DataError: it is not JSON, of another format, or was changed.
    """
    try:
        content = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise _damaged(checkpoint, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(checkpoint, f"expected an object, got {type(content).__name__}")
    if content.get("format") != FORMAT:
        raise _damaged(checkpoint, f"its format is {content.get('format')!r:.100}; this version reads {FORMAT}")
    if content.pop("sha256", None) != _checksum(content):
        raise _damaged(checkpoint, "its content has another SHA-256 than it states")
    return cast(Manifest, content)


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _damaged(checkpoint: Path, reason: str) -> DataError:
    text = f"{MANIFEST} of the checkpoint {str(checkpoint)!r} is damaged: {reason}"
    return DataError(text, path=str(checkpoint / MANIFEST))


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint of a step."""
    return root / STEP.format(step)


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint at ``path``: the directory itself, or the one that its file ``latest`` names.

    Raises:
        DataError: if there is none, or it was never finished, or it has lost its manifest.
    """
    root = Path(path)
    pointer = root / LATEST
    checkpoint = root / _named_by(pointer) if pointer.is_file() else root
    if not checkpoint.exists():
        checkpoint = partial_path(checkpoint)  # complete, if a save of the same step was stopped between its renames
    if not (checkpoint / MANIFEST).is_file():
        if (checkpoint / METADATA).is_file():
            raise DataError(
                f"the checkpoint {str(checkpoint)!r} is damaged: it has no {MANIFEST}, with which a save ends; load "
                "another",
                path=str(checkpoint / MANIFEST),
            )
        raise DataError(
            f"there is no checkpoint at {str(path)!r}: expected {MANIFEST}, a file {LATEST!r} naming a directory that "
            "has one, or a distributed checkpoint of Megatron-LM",
            path=str(path),
        )
    return checkpoint


def _named_by(pointer: Path) -> str:
    """Return the name in the file ``latest``."""
    name = pointer.read_bytes()[:200].decode(errors="replace").strip()
    if not re.fullmatch(STEP.format("[0-9]+"), name):
        text = f"{str(pointer)!r} contains {name!r}, expected the name of a checkpoint such as {STEP.format(100)}"
        raise DataError(text, path=str(pointer))
    return name
