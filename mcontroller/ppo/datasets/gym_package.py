"""The package reasoning-gym."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from mcontroller.config.imports import import_extra

__all__ = ["import_reasoning_gym"]


def import_reasoning_gym() -> ModuleType:
    """Return reasoning-gym, importable without pycosat.

    pycosat is a C extension without wheels that only the zebra puzzles use, but importing any task imports all of
    them. If it is not installed, an empty module replaces it: zebra puzzles then fail, all other tasks work.
    """
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = ModuleType("pycosat")
    return import_extra("reasoning_gym", "demo", "task")
