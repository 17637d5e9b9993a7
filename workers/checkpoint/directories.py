"""The directories of checkpoints: finding one, replacing it atomically, deleting old ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from mcontroller.errors import DataError
from workers.checkpoint.manifest import MANIFEST, Manifest

__all__ = ["checkpoint_path", "commit", "create_partial", "find_checkpoint", "partial_path"]

_STEP = "global_step_{}"
_LATEST = "latest"


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint of a step."""
    return root / _STEP.format(step)


def partial_path(target: Path) -> Path:
    """Return the directory in which ``target`` is written before it is committed."""
    return target.with_name(f".{target.name}.partial")


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint at ``path``: the directory itself, or the one that its file ``latest`` names.

    Raises:
        DataError: if there is none, or it was never finished.
    """
    root = Path(path)
    pointer = root / _LATEST
    found = root / pointer.read_text().strip() if pointer.is_file() else root
    if not found.exists():
        found = partial_path(found)  # complete, if a save of the same step was stopped between its two renames
    if not (found / MANIFEST).is_file():
        raise DataError(
            f"there is no checkpoint at {str(path)!r}: expected {MANIFEST}, a file {_LATEST!r} naming a directory that "
            "has one, or a distributed checkpoint of Megatron-LM",
            path=str(path),
        )
    return found


def create_partial(target: Path) -> None:
    """Create an empty directory at ``partial_path(target)``.

    Raises:
        DataError: if it cannot be created.
    """
    partial = partial_path(target)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"cannot write a checkpoint to {str(target)!r}: {error}", path=str(target)) from error


def commit(target: Path, manifest: Manifest, keep: int | None) -> None:
    """Rename the finished ``partial_path(target)`` to ``target``, and point ``latest`` to it.

    Args:
        target: the directory of the checkpoint.
        manifest: written into it first.
        keep: how many checkpoints stay: this one and the newest steps of the others. Remains of interrupted saves are
            deleted too. None keeps everything.
    """
    partial = partial_path(target)
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
        _delete_old(target, keep)


def _delete_old(target: Path, keep: int) -> None:
    """Delete the oldest steps but never ``target``, which is not the newest if an earlier run went further."""
    found = (int(other.name.rsplit("_", 1)[1]) for other in target.parent.glob(_STEP.format("[0-9]*")))
    steps = sorted(step for step in found if checkpoint_path(target.parent, step) != target)
    for step in steps[: max(len(steps) + 1 - keep, 0)]:
        shutil.rmtree(checkpoint_path(target.parent, step))
    for interrupted in target.parent.glob(f".{_STEP.format('[0-9]*')}.*"):
        shutil.rmtree(interrupted)
