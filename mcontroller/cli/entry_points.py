"""Entry points of installed distributions, and of this project's checkout."""

from __future__ import annotations

import importlib.metadata
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import mcontroller

__all__ = ["CONFIGS", "VERBS", "entry_points"]

DISTRIBUTION = "mcontroller"
VERBS = "mcontroller.verbs"
"""Group of the verbs: name -> module."""
CONFIGS = "mcontroller.configs"
"""Group of the configurations: key in the configuration of a run -> dataclass."""


def entry_points(group: str, checkout: Path | None = None) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, sorted.

    In a checkout, those of this project are read from its ``pyproject.toml``: it may be on PYTHONPATH without being
    installed, and the metadata of an editable install do not change when the file does.

    Args:
        group: the name of the group.
        checkout: the directory that contains the package ``mcontroller``; by default that of the imported one.
    """
    root = checkout or Path(mcontroller.__file__).resolve().parent.parent
    project = root / "pyproject.toml"
    installed = list(importlib.metadata.entry_points(group=group))
    if project.is_file() and (own := _declared(project, group)) is not None:
        installed = [entry for entry in installed if entry.dist is None or entry.dist.name != DISTRIBUTION] + own
    return {entry.name: entry for entry in sorted(installed, key=lambda entry: entry.name)}


def _declared(project: Path, group: str) -> list[EntryPoint] | None:
    """Return the entry points that ``pyproject.toml`` declares; None if it is that of another project."""
    declared = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
    if declared.get("name") != DISTRIBUTION:
        return None
    entries = declared.get("entry-points", {}).get(group, {})
    return [EntryPoint(name, value, group) for name, value in entries.items()]
