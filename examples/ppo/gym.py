"""reasoning-gym, importable where one of its dependencies is not.

Only its zebra puzzles use pycosat, a C extension without wheels; importing any of its tasks imports them all. On a
machine without a compiler an empty module stands in for it: a zebra puzzle then fails by name, the rest is whole.
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
