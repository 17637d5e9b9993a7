"""Distributed checkpoints written by Megatron-LM: their weights, and the step.

``latest_checkpointed_iteration.txt`` names a directory ``iter_0000100`` (or ``release``) with the files of
``megatron.core.dist_checkpointing``. Its weights have the same names as ours. Its vocabulary may have more padding.
"""

from __future__ import annotations

from pathlib import Path

from mcontroller.errors import DataError
from workers.checkpoint.manifest import FORMAT, MANIFEST, METADATA, Manifest
from workers.checkpoint.state import RANDOM
from workers.checkpoint.unpickle import read_common, read_metadata

_LATEST = "latest_checkpointed_iteration.txt"


def find_megatron_lm_checkpoint(root: Path) -> Path | None:
    """Return Megatron-LM's checkpoint at ``root``, or the latest one in it; None if there is none or it is ours.

    Raises:
        DataError: if the file that names the latest one is damaged, or the description of the checkpoint is.
    """
    pointer = root / _LATEST
    checkpoint = root
    if pointer.is_file():
        latest = pointer.read_bytes()[:200].decode(errors="replace").strip()
        if latest != "release" and not latest.isdecimal():
            raise DataError(f"{str(pointer)!r} contains {latest!r}, expected a number or 'release'", path=str(root))
        checkpoint = root / (latest if latest == "release" else f"iter_{int(latest):07d}")
    if not (checkpoint / METADATA).is_file() or (checkpoint / MANIFEST).is_file():
        return None
    names = read_metadata(checkpoint).state_dict_metadata
    return None if any(name.startswith(f"{RANDOM}/") for name in names) else checkpoint  # ours has lost its manifest


def megatron_lm_manifest(checkpoint: Path, vocab_size: int) -> Manifest:
    """Return a manifest for Megatron-LM's checkpoint, of which only weights are read.

    Args:
        checkpoint: its directory.
        vocab_size: of the model that reads it; all further rows count as padding.
    """
    return {
        "format": FORMAT,
        "step": _iteration(checkpoint),
        "layout": None,
        "parts": ["model"],
        "distributed_optimizer": False,
        "optimizer_buckets": None,
        "scheduler_steps": 0,
        "counters": {},
        "vocab_size": vocab_size,
        "files": {},
    }


def _iteration(checkpoint: Path) -> int:
    iteration = read_common(checkpoint).get("iteration", 0)
    if not isinstance(iteration, int) or iteration < 0:
        text = f"the checkpoint {str(checkpoint)!r} is damaged: iteration is {iteration!r:.100} in common.pt"
        raise DataError(text, path=str(checkpoint))
    return iteration
