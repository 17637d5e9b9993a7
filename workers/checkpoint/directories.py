"""The directories of checkpoints: finding one, replacing it atomically, deleting old ones.

Megatron-LM finds the same checkpoints under its own names: ``iter_0000100`` is a link to ``global_step_100``, and
``latest_checkpointed_iteration.txt`` has the number of the newest.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from mcontroller.errors import DataError
from mcontroller.files import acquire_lock, delete_with_links, release_lock, replace_text, sync_directory
from workers.checkpoint.manifest import MANIFEST, Manifest, write_manifest

__all__ = ["checkpoint_path", "commit", "create_partial", "delete_partial", "find_checkpoint", "partial_path"]

_STEP = "global_step_{}"
_LATEST = "latest"
_LOCK = ".save.lock"
_LINK = "iter_{:07d}"
_LATEST_OF_MEGATRON_LM = "latest_checkpointed_iteration.txt"


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
    found = root / _named_by(pointer) if pointer.is_file() else root
    if not found.exists():
        found = partial_path(found)  # complete, if a save of the same step was stopped between its two renames
    if not (found / MANIFEST).is_file():
        raise DataError(
            f"there is no checkpoint at {str(path)!r}: expected {MANIFEST}, a file {_LATEST!r} naming a directory that "
            "has one, or a distributed checkpoint of Megatron-LM",
            path=str(path),
        )
    return found


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
    if link.is_symlink():  # else it is a checkpoint that Megatron-LM saved here: its file names its own newest one
        replace_text(target.with_name(_LATEST_OF_MEGATRON_LM), str(step))


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("_", 1)[1])


def _delete_old(target: Path, keep: int) -> None:
    """Delete the oldest steps but never ``target``, which is not the newest if an earlier run went further."""
    found = map(_step_of, target.parent.glob(_STEP.format("[0-9]*")))
    steps = sorted(step for step in found if checkpoint_path(target.parent, step) != target)
    for step in steps[: max(len(steps) + 1 - keep, 0)]:
        delete_with_links(checkpoint_path(target.parent, step))
    for interrupted in target.parent.glob(f".{_STEP.format('[0-9]*')}.*"):
        shutil.rmtree(interrupted)
