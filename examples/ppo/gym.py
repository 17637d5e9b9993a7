"""reasoning-gym, importable without pycosat.

pycosat is a C extension without wheels that only the zebra puzzles use, but importing any task imports all of them. If
it is not installed, an empty module replaces it: zebra puzzles then fail, all other tasks work.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

if importlib.util.find_spec("pycosat") is None:
    sys.modules["pycosat"] = ModuleType("pycosat")

import reasoning_gym
from reasoning_gym.factory import DATASETS

__all__ = ["DATASETS", "reasoning_gym"]
