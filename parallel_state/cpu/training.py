"""Patch ``megatron.training``, Megatron-LM's own training code, to start without CUDA.

The code is not part of megatron-core's wheel; the patches apply to a checkout of Megatron-LM in ``sys.path``.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType
from typing import Any, NoReturn

from parallel_state.errors import ParallelStateError
from parallel_state.patches.import_hook import Patch

_TRITON_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


def replace_triton_kernels() -> None:
    """Replace Megatron-Core's batch-invariant kernels if Triton is missing.

    ``megatron.training`` imports them when it is imported, whether or not they are used.
    """
    if importlib.util.find_spec("triton") is None:
        module = ModuleType(_TRITON_KERNELS)
        vars(module).update(__getattr__=_kernel, is_batch_invariant_mode_enabled=lambda: False)
        sys.modules[_TRITON_KERNELS] = module


def _kernel(name: str) -> Any:
    """Return a function in place of any kernel: Megatron imports them by name."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _reject_batch_invariant_mode


def _reject_batch_invariant_mode(*args: Any, **kwargs: Any) -> NoReturn:
    raise ParallelStateError("batch_invariant_mode needs Triton and a GPU; leave it off on a CPU")


def _initialize(module: Any) -> None:
    """Pass ``allow_no_cuda=True`` to ``initialize_megatron``, which asserts a GPU otherwise."""
    initialize = module.initialize_megatron

    @functools.wraps(initialize)
    def without_cuda(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 4:
            kwargs["allow_no_cuda"] = True
        else:
            args = (*args[:3], True, *args[4:])
        return initialize(*args, **kwargs)

    module.initialize_megatron = without_cuda


def _fused_kernels(module: Any) -> None:
    """Do not compile CUDA kernels: ``load`` runs nvcc."""
    module.load = lambda args: None


PATCHES: dict[str, Patch] = {
    "megatron.training.initialize": _initialize,
    "megatron.legacy.fused_kernels": _fused_kernels,
}
"""Module name -> the function that patches it."""
