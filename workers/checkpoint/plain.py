"""Megatron-LM's own distributed checkpoints, read as if they were ours: their weights, and the step.

``latest_checkpointed_iteration.txt`` names a directory ``iter_0000100`` (or ``release``), whose files are those of
``megatron.core.dist_checkpointing``. Its weights have the names that ours have; its vocabulary may be padded further.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from mcontroller.errors import DataError
from workers.checkpoint.files import MANIFEST

__all__ = ["find_plain", "plain_manifest"]

_METADATA = ".metadata"
_LATEST = "latest_checkpointed_iteration.txt"
_OVER_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


def find_plain(root: Path) -> Path | None:
    """The checkpoint at ``root``, itself or what its pointer to the latest names; None without one, or for ours."""
    pointer = root / _LATEST
    found = root
    if pointer.is_file():
        latest = pointer.read_text().strip()
        if latest != "release" and not latest.isdecimal():
            raise DataError(f"{str(pointer)!r} says {latest!r}: expected a number or 'release'", path=str(root))
        found = root / (latest if latest == "release" else f"iter_{int(latest):07d}")
    return found if (found / _METADATA).is_file() and not (found / MANIFEST).is_file() else None


def plain_manifest(checkpoint: Path, vocab_size: int) -> dict[str, Any]:
    """What a manifest of ours would say of it, of a model with this vocabulary; there is nothing but weights in it."""
    tensors = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    weights = {name: list(tensor.global_shape) for name, tensor in tensors.items() if "optimizer." not in name}
    for name in _OVER_VOCABULARY:
        if name in weights:
            weights[name][0] = min(weights[name][0], vocab_size)
    return {
        "step": int(dist_checkpointing.load_common_state_dict(str(checkpoint)).get("iteration", 0)),
        "layout": None,
        "parts": ["model"],
        "distributed_optimizer": False,
        "scheduler_steps": 0,
        "counters": {},
        "weights": {"model": weights},
    }
