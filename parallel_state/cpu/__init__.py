"""Run Megatron-Core on a CPU with gloo; do nothing on a machine with a GPU.

Megatron is written for CUDA. Four modules adapt it to a CPU: ``torch_cuda`` replaces functions of ``torch.cuda``,
``gloo`` the collectives that gloo lacks or gets wrong, ``literals`` the string ``"cuda"`` in Megatron's sources, and
``megatron`` a few of Megatron's own functions. ``install`` applies all four, before Megatron is imported.
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
    """Patch this process so that Megatron-Core runs on the CPU, unless CUDA is available.

    Does not import Megatron. Later calls change nothing. Thread-safe.

    Returns:
        True if Megatron-Core runs on the CPU in this process; False if CUDA is available and nothing was changed.

    Raises:
        ParallelStateError: ``megatron.core`` was imported before the first call.
    """
    global _installed
    with _lock:
        if _installed:
            return True
        if torch.cuda.is_available():
            return False
        if "megatron.core" in sys.modules:
            raise ParallelStateError(
                "megatron.core was imported before parallel_state.cpu.install(), so that 'cuda' is compiled into it; "
                "call install() (or import workers) before the first import of megatron",
                module="megatron.core",
            )
        _hide_transformer_engine()
        torch_cuda.patch_cuda()
        gloo.patch_collectives()
        literals.install_hook(megatron.PATCHES)
        _installed = True
        return True


def _hide_transformer_engine() -> None:
    """Make ``import transformer_engine`` raise ImportError, which Megatron handles.

    Without a GPU it raises RuntimeError, and then megatron.core cannot be imported.
    """
    if "transformer_engine" not in sys.modules and importlib.util.find_spec("transformer_engine"):
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
