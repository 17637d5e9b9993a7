"""The manifest of a checkpoint: a JSON file with its step, layout, parts, counters and the shape of every weight."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from mcontroller.errors import DataError

__all__ = ["MANIFEST", "Manifest", "Shapes", "read_manifest"]

MANIFEST = "manifest.json"
Shapes = Mapping[str, Mapping[str, list[int]]]
"""By part, the name and shape of every weight in the whole model, without padding of its vocabulary."""


class Manifest(TypedDict):
    """The description of a checkpoint, in the file ``manifest.json`` of its directory."""

    format: int
    """Version of this description, 1."""
    step: int
    """The step that it was saved at."""
    layout: dict[str, Any] | None
    """World size, and size and order of the axes; None if unknown."""
    parts: list[str]
    """The parts that it has, of "model", "reference" and "optimizer"."""
    distributed_optimizer: bool
    """Whether the state was saved by a distributed optimizer."""
    scheduler_steps: int
    """Steps of the learning-rate schedule so far."""
    counters: dict[str, Any]
    """Counters of the worker, see ``ModelWorker.training``; empty if unknown."""
    weights: Shapes
    """The shapes of the weights."""


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of the checkpoint in this directory.

    Raises:
        DataError: if it is not JSON.
    """
    try:
        return json.loads((checkpoint / MANIFEST).read_text())
    except ValueError as error:
        text = f"{MANIFEST} of the checkpoint {str(checkpoint)!r} is damaged: {error}"
        raise DataError(text, path=str(checkpoint)) from error
