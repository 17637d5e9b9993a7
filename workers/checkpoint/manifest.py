"""The directories of checkpoints: finding one, replacing it atomically, deleting old ones; and their manifests.

The manifest is a JSON file with the step, layout, parts, counters and the shape of every weight. Megatron-LM finds the
same checkpoints under its own names: ``iter_0000100`` is a link to ``global_step_100``, and
``latest_checkpointed_iteration.txt`` has the number of the newest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from mcontroller.errors import DataError
from mcontroller.files import acquire_lock, delete_with_links, release_lock, replace_text, sync_directory

MANIFEST = "manifest.json"
METADATA = ".metadata"
"""The description of a distributed checkpoint by torch, in Megatron-LM's too."""
Shapes = Mapping[str, Mapping[str, list[int]]]
"""By part, the name and shape of every weight in the whole model, without padding of its vocabulary."""
Buckets = Mapping[str, list[list[Any]]]
"""By optimizer and model-parallel rank, for each buffer its dtypes and the elements of its buckets."""

_STEP = "global_step_{}"
_LATEST = "latest"
_LOCK = ".save.lock"
_LINK = "iter_{:07d}"
_LATEST_OF_MEGATRON_LM = "latest_checkpointed_iteration.txt"


class FileEntry(TypedDict):
    """A file of a checkpoint in its manifest."""

    size: int
    """[bytes] Its length."""
    sha256: str
    """Its SHA-256, in hexadecimal: the one that ``sha256sum`` prints."""


class Manifest(TypedDict):
    """The description of a checkpoint, in the file ``manifest.json`` of its directory."""

    format: int
    """Version of this description: 3."""
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
    weights: Shapes
    """The shapes of the weights."""
    base: NotRequired[dict[str, Any] | None]
    """If the weights are of adapters: path and SHA-256 of the base, and the factor of the adapters; else None."""
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
        DataError: it is not JSON, or a value is missing or of another type; the text names it.
    """
    try:
        content = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise _damaged(checkpoint, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(checkpoint, f"expected an object, got {type(content).__name__}")
    if content.get("format") != 3:
        raise _damaged(checkpoint, f"its format is {content.get('format')!r:.100}; this version reads format 3")
    if content.pop("sha256", None) != _checksum(content):
        raise _damaged(checkpoint, "its content has another SHA-256 than it states")
    for name, expected in _FIELDS.items():
        if name not in content or not expected(content[name]):
            value = repr(content[name])[:100] if name in content else "missing"
            raise _damaged(checkpoint, f"{name} is {value}")
    if set(content["weights"]) != set(content["parts"]) - {"optimizer"}:
        reason = f"it has the parts {content['parts']!r:.100} and weights of {list(content['weights'])!r:.100}"
        raise _damaged(checkpoint, reason)
    return cast(Manifest, content)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_weights(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(part, dict) and all(map(_is_shape, part.values())) for part in parts)


def _are_files(value: Any) -> bool:
    """Names of files in the directory itself, with their length and checksum."""
    return isinstance(value, dict) and all(
        name == Path(name).name
        and isinstance(entry, dict)
        and _is_count(entry.get("size"))
        and isinstance(entry.get("sha256"), str)
        for name, entry in value.items()
    )


def _are_buckets(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(buffers, list) and all(isinstance(buffer, list) for buffer in buffers) for buffers in value.values()
    )


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "layout": lambda value: isinstance(value, dict),
    "parts": lambda value: isinstance(value, list) and bool(value) and all(isinstance(part, str) for part in value),
    "distributed_optimizer": lambda value: isinstance(value, bool),
    "optimizer_buckets": lambda value: value is None or _are_buckets(value),
    "scheduler_steps": _is_count,
    "counters": lambda value: isinstance(value, dict) and all(isinstance(count, int | str) for count in value.values()),
    "weights": _are_weights,
    "files": _are_files,
}
"""By field, whether a value is one that it can have."""


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _damaged(checkpoint: Path, reason: str) -> DataError:
    text = f"{MANIFEST} of the checkpoint {str(checkpoint)!r} is damaged: {reason}"
    return DataError(text, path=str(checkpoint / MANIFEST))


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint of a step."""
    return root / _STEP.format(step)


def partial_path(target: Path) -> Path:
    """Return the directory in which ``target`` is written before it is committed."""
    return target.with_name(f".{target.name}.partial")


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint at ``path``: the directory itself, or the one that its file ``latest`` names.

    Raises:
        DataError: if there is none, or it was never finished, or it has lost its manifest.
    """
    root = Path(path)
    pointer = root / _LATEST
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
            f"there is no checkpoint at {str(path)!r}: expected {MANIFEST}, a file {_LATEST!r} naming a directory that "
            "has one, or a distributed checkpoint of Megatron-LM",
            path=str(path),
        )
    return checkpoint


def _named_by(pointer: Path) -> str:
    """Return the name in the file ``latest``."""
    name = pointer.read_bytes()[:200].decode(errors="replace").strip()
    if not re.fullmatch(_STEP.format("[0-9]+"), name):
        text = f"{str(pointer)!r} contains {name!r}, expected the name of a checkpoint such as {_STEP.format(100)}"
        raise DataError(text, path=str(pointer))
    return name


def create_partial(target: Path) -> None:
    """Create an empty directory at ``partial_path(target)``, and lock the directory that it is in.

    Raises:
        DataError: if it cannot be created, or another process saves there.
    """
    partial = partial_path(target)
    try:
        acquire_lock(target.with_name(_LOCK), f"the directory of checkpoints {target.parent}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        delete_partial(target)
        raise DataError(f"cannot write a checkpoint to {str(target)!r}: {error}", path=str(target)) from error


def delete_partial(target: Path) -> None:
    """Delete what was written of a checkpoint that was not committed."""
    shutil.rmtree(partial_path(target), ignore_errors=True)
    release_lock(target.with_name(_LOCK))


def commit(target: Path, manifest: Manifest, keep: int | None) -> None:
    """Rename the finished ``partial_path(target)`` to ``target``, point ``latest`` to it, and release the lock.

    Args:
        target: the directory of the checkpoint.
        manifest: written into it first.
        keep: how many checkpoints stay: this one and the newest steps of the others. Remains of interrupted saves are
            deleted too. None keeps everything.

    Raises:
        DataError: a file cannot be written or renamed.
    """
    try:
        _replace(target, manifest)
    except OSError as error:
        raise DataError(f"cannot write the checkpoint {str(target)!r}: {error}", path=str(target)) from error
    if keep is not None:
        _delete_old(target, keep)
    release_lock(target.with_name(_LOCK))


def _replace(target: Path, manifest: Manifest) -> None:
    partial = partial_path(target)
    write_manifest(partial, manifest)
    sync_directory(partial)
    if target.exists():
        replaced = target.with_name(f".{target.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
        partial.rename(target)
        shutil.rmtree(replaced)
    else:
        partial.rename(target)
    replace_text(target.with_name(_LATEST), target.name)
    step = _step_of(target)
    link = target.with_name(_LINK.format(step))
    if not link.exists():
        link.symlink_to(target.name)
    if link.is_symlink():  # else Megatron-LM saved into this directory, and its file names its own newest checkpoint
        replace_text(target.with_name(_LATEST_OF_MEGATRON_LM), str(step))


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("_", 1)[1])


def _delete_old(target: Path, keep: int) -> None:
    """Delete the oldest steps but never ``target``, which is not the newest if an earlier run made more steps."""
    saved = map(_step_of, target.parent.glob(_STEP.format("[0-9]*")))
    steps = sorted(step for step in saved if checkpoint_path(target.parent, step) != target)
    for step in steps[: max(len(steps) + 1 - keep, 0)]:
        delete_with_links(checkpoint_path(target.parent, step))
    for interrupted in target.parent.glob(f".{_STEP.format('[0-9]*')}.*"):
        shutil.rmtree(interrupted)
