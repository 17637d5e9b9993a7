"""The directories of checkpoints: found, put in place all at once, and dropped when newer ones are enough."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcontroller.errors import DataError

__all__ = ["MANIFEST", "directory_of", "find_checkpoint", "new_partial", "partial_of", "publish", "read_manifest"]

_STEP = "global_step_{}"
_LATEST = "latest"
MANIFEST = "manifest.json"


def directory_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return root / _STEP.format(step)


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The checkpoint at ``path``: itself, or the one that ``latest`` in it names.

    Raises:
        DataError: there is none, or it was never finished.
    """
    root = Path(path)
    pointer = root / _LATEST
    found = root / pointer.read_text().strip() if pointer.is_file() else root
    if not found.exists():
        found = partial_of(found)  # whole, where a save of the same step was stopped between its two renames
    if not (found / MANIFEST).is_file():
        raise DataError(
            f"there is no checkpoint at {str(path)!r}: expected {MANIFEST}, a file {_LATEST!r} naming a directory that "
            "has one, or a distributed checkpoint of Megatron-LM",
            path=str(path),
        )
    return found


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What the checkpoint says of itself: step, layout, parts, counters, the shape of every weight."""
    try:
        return json.loads((checkpoint / MANIFEST).read_text())
    except ValueError as error:
        text = f"{MANIFEST} of the checkpoint {str(checkpoint)!r} is damaged: {error}"
        raise DataError(text, path=str(checkpoint)) from error


def new_partial(target: Path) -> None:
    """An empty directory at ``partial_of(target)`` to write into; DataError where there can be none."""
    partial = partial_of(target)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"cannot write a checkpoint to {str(target)!r}: {error}", path=str(target)) from error


def publish(target: Path, manifest: Mapping[str, Any], keep: int | None) -> None:
    """Finish what was written into ``new_partial(target)``: name it ``target``, point ``latest`` to it.

    Args:
        keep: how many checkpoints stay, this one and the newest steps of the others, without what a save that was
            interrupted has left; None keeps all.
    """
    partial = partial_of(target)
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    if target.exists():
        replaced = target.with_name(f".{target.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
        partial.rename(target)
        shutil.rmtree(replaced)
    else:
        partial.rename(target)
    pointer = target.with_name(f".{_LATEST}.partial")
    pointer.write_text(target.name)
    os.replace(pointer, target.with_name(_LATEST))
    if keep is not None:
        _drop_old(target, keep)


def partial_of(target: Path) -> Path:
    """Where ``target`` is written before it has its name."""
    return target.with_name(f".{target.name}.partial")


def _drop_old(target: Path, keep: int) -> None:
    """A run that begins again where a longer one has been counts its steps from further down: what it writes stays."""
    found = (int(other.name.rsplit("_", 1)[1]) for other in target.parent.glob(_STEP.format("[0-9]*")))
    steps = sorted(step for step in found if directory_of(target.parent, step) != target)
    for step in steps[: max(len(steps) + 1 - keep, 0)]:
        shutil.rmtree(directory_of(target.parent, step))
    for interrupted in target.parent.glob(f".{_STEP.format('[0-9]*')}.*"):
        shutil.rmtree(interrupted)
