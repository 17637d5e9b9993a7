"""Run Megatron-Core on a CPU with gloo; inert where there is a GPU.

Megatron is written for CUDA throughout. Four things stand between it and a CPU, each in a file of its own: calls into
``torch.cuda`` (``torch_cuda``), what gloo lacks or gets wrong (``gloo``), the literal ``"cuda"`` in Megatron's
sources (``literals``), and a handful of Megatron's own functions (``megatron``). ``install`` puts all four in
place, before Megatron is imported; with a GPU it does nothing at all.
"""

from __future__ import annotations

import importlib.util
import sys
import threading

import torch

from parallel_state.cpu import gloo, literals, megatron, torch_cuda
from parallel_state.errors import ParallelStateError

_lock = threading.Lock()
_installed = False


def install() -> bool:
    """True once Megatron-Core runs on this process's CPU; False, with nothing changed, where CUDA is available.

    May be called any number of times, by any thread. Does not import Megatron.

    Raises:
        ParallelStateError: ``megatron.core`` was imported before the first call, so that its sources can no longer
            be adapted.
    """
    global _installed
    with _lock:
        if _installed:
            return True
        if torch.cuda.is_available():
            return False
        if "megatron.core" in sys.modules:
            raise ParallelStateError(
                "megatron.core was imported before parallel_state.cpu.install(), and has 'cuda' compiled into it: "
                "call install() (or import workers) before the first import of megatron",
                module="megatron.core",
            )
        _hide_transformer_engine()
        torch_cuda.redirect()
        gloo.redirect()
        literals.hook(megatron.PATCHES)
        _installed = True
        return True


def _hide_transformer_engine() -> None:
    """Transformer Engine raises RuntimeError on import without a GPU, which takes megatron.core down with it."""
    if "transformer_engine" not in sys.modules and importlib.util.find_spec("transformer_engine"):
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # None: an import raises ImportError
