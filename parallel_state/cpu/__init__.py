"""Run Megatron-Core on a CPU with gloo; do nothing on a machine with a GPU.

Megatron is written for CUDA. Seven modules adapt it to a CPU: ``torch_cuda`` replaces functions of ``torch.cuda``,
``gloo`` the collectives that gloo lacks or gets wrong, ``products`` slow products of matrices (``aten::mm``),
``literals`` the string ``"cuda"`` in Megatron's sources, ``megatron`` a few of Megatron-Core's functions, ``training``
those of ``megatron.training``, and ``bridge`` an import of Megatron-Bridge. ``install`` applies all seven, before
Megatron is imported.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import warnings
from collections.abc import Collection

import torch

from parallel_state.cpu import bridge, gloo, literals, megatron, products, torch_cuda, training
from parallel_state.errors import ParallelStateError

_lock = threading.Lock()
_installed = False


def install(*, packages: Collection[str] = ()) -> bool:
    """Patch this process so that Megatron-Core runs on the CPU, unless CUDA is available.

    Does not import Megatron. Later calls only add packages. Thread-safe.

    Args:
        packages: your own packages or modules that are written for CUDA, for instance ``["team", "pretrain_gpt"]``.
            ``"cuda"`` in their sources is replaced with ``"cpu"`` when they are imported.

    Returns:
        True if Megatron-Core runs on the CPU in this process; False if CUDA is available and nothing was changed.

    Raises:
        ParallelStateError: ``megatron.core`` was imported before the first call, or a package before it was named.
    """
    global _installed
    with _lock:
        if not _installed and torch.cuda.is_available():
            return False
        _check_not_imported(packages)
        if _installed:
            literals.add_packages(packages)
            return True
        if "megatron.core" in sys.modules:
            raise ParallelStateError(
                "megatron.core was imported before parallel_state.cpu.install(), so that 'cuda' is compiled into it; "
                "call install() (or import workers) before the first import of megatron",
                module="megatron.core",
            )
        _hide_transformer_engine()
        # what every command would print: ``megatron`` replaces these packages, and Megatron's own default is deprecated
        for message in ("(Transformer Engine and )?Apex (is|are) not installed", "full scope is deprecated"):
            warnings.filterwarnings("ignore", message, UserWarning, r"megatron\.core\b")
        # deprecated functions of torch, which Megatron calls
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron\.core|torch\.distributed)\b")
        torch_cuda.patch_cuda()
        gloo.patch_collectives()
        products.patch_products()
        training.replace_triton_kernels()
        literals.add_packages(packages)
        literals.install_hook(megatron.PATCHES | training.PATCHES)
        bridge.stand_in_for_engine()
        _installed = True
        return True


def _check_not_imported(packages: Collection[str]) -> None:
    if isinstance(packages, str):
        raise ParallelStateError(f"packages must be a list of names, got the string {packages!r}")
    for name in packages:
        if name in sys.modules and not literals.is_rewritten(name):
            raise ParallelStateError(
                f"{name} was imported before parallel_state.cpu.install(packages=[{name!r}]), so that 'cuda' is "
                f"compiled into it; call install() before the first import of {name}",
                module=name,
            )


def _hide_transformer_engine() -> None:
    """Make ``import transformer_engine`` raise ImportError, which Megatron handles.

    Without a GPU it raises RuntimeError, and then megatron.core cannot be imported.
    """
    if "transformer_engine" not in sys.modules and importlib.util.find_spec("transformer_engine"):
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
