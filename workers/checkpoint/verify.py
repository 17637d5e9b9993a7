"""Verifying a checkpoint before anything changes: the content of its files, and the types of its pickles."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch.distributed as dist

from mcontroller.errors import DataError
from parallel_state.agreement import raise_on_every_rank
from workers.checkpoint.checksums import verify_files
from workers.checkpoint.manifest import Manifest
from workers.checkpoint.unpickle import check_objects, read_common, read_metadata

__all__ = ["verify"]

_CONFIG = "metadata.json"
_logger = logging.getLogger(__name__)


def verify(checkpoint: Path, manifest: Manifest) -> None:
    """Check all files of a checkpoint, each rank a part of the content (a collective).

    A checkpoint without checksums, of an earlier version or of Megatron-LM, is checked for complete files and for the
    types of its pickles.

    Args:
        checkpoint: its directory.
        manifest: its manifest.

    Raises:
        DataError: on every rank, if a file is missing or damaged, or would run code; names the file.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if not manifest["files"] and rank == 0:
        _logger.warning("the checkpoint %r has no checksums: the content of its files is not verified", str(checkpoint))
    verify_files(checkpoint, manifest["files"], rank, world_size)
    raise_on_every_rank(lambda: _check_types(checkpoint, rank, world_size))


def _check_types(checkpoint: Path, rank: int, world_size: int) -> None:
    _check_config(checkpoint)
    read_common(checkpoint)
    check_objects(checkpoint, read_metadata(checkpoint), rank, world_size)


def _check_config(checkpoint: Path) -> None:
    """Check ``metadata.json``, by which Megatron chooses the reader."""
    try:
        content = json.loads((checkpoint / _CONFIG).read_text(encoding="utf-8"))
        known = isinstance(content, dict) and content.get("sharded_backend") == "torch_dist"
        reason = f"its content is {content!r:.200}, expected sharded_backend 'torch_dist'"
    except (ValueError, RecursionError, OSError) as error:
        known, reason = False, str(error)
    if not known:
        text = f"the checkpoint {str(checkpoint)!r} is damaged: {_CONFIG} cannot be read: {reason}"
        raise DataError(text, path=str(checkpoint), file=_CONFIG)
