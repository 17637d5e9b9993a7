"""A pytest plugin: the CPU with the stand-in for Transformer Engine of ``tests/fake_cuda``, for Bridge's own layers.

Megatron-Core decides at its import whether it uses Transformer Engine, so these tests have a separate process::

    PYTHONPATH=tests/bridge python -m pytest -p with_transformer_engine tests/bridge

A checkout of Megatron-LM on PYTHONPATH has a package ``tests`` too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from parallel_state import cpu

sys.path.insert(0, str(Path(__file__).parents[1] / "fake_cuda" / "site-packages"))
cpu.install(packages=["transformer_engine"])
sys.modules.pop("transformer_engine", None)  # hidden by ``install``
os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Megatron asks for it with ``deterministic_mode``
