"""Report a missing package in one line that contains the command to install it.

The distribution depends on what layouts need alone: teams build torch, megatron-core and Transformer Engine for their
own images, and verify a layout without Ray (docs/index.md).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator

from parallel_state.errors import BrokenPackageError, MissingPackageError

EXTRAS = {
    "torch": "torch",
    "tensordict": "torch",
    "megatron": "megatron",
    "omegaconf": "ray",
    "psutil": "ray",
    "ray": "ray",
    "rich": "ray",
    "safetensors": "ray",
    "zmq": "ray",
}
"""Top-level module -> the extra of this distribution that installs it."""


def require(*modules: str) -> None:
    """Raise an error that names the first of these modules that cannot be found; import none of them.

    Args:
        modules: dotted module names, such as ``"torch"`` or ``"megatron.core"``.

    Raises:
        MissingPackageError: a module is not installed and not on PYTHONPATH.
    """
    for module in modules:
        try:
            installed = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the parent package of a dotted name is missing
            installed = False
        if not installed:
            raise missing_package(module)


def has_megatron() -> bool:
    """Return whether Megatron-Core is installed."""
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


def require_importable(module: str) -> None:
    """Import a module if it is installed, and raise an error of one line if that fails.

    Megatron takes a Transformer Engine whose import raises ImportError for one that is not installed, and fails with
    the traceback of any other error.

    Args:
        module: the name of a top-level module, such as ``"transformer_engine"``.

    Raises:
        BrokenPackageError: the module is installed, and its import raises.
    """
    if sys.modules.get(module, module) is None or importlib.util.find_spec(module) is None:
        return  # hidden, or not installed
    try:
        importlib.import_module(module)
    except Exception as error:
        cause = " ".join(str(error).split())
        raise BrokenPackageError(
            f"{module} is installed but cannot be imported ({type(error).__name__}: {cause:.300}): install a build for "
            "this version of torch and CUDA, or uninstall it to use layers of plain PyTorch (docs/gpu.md)",
            name=module,
        ) from error


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Raise MissingPackageError for a package that the block imports, that is missing, and that an extra installs."""
    try:
        yield
    except MissingPackageError:
        raise
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in EXTRAS:
            raise missing_package(error.name or "") from error
        raise


def missing_package(module: str) -> MissingPackageError:
    """Return the error for a module that cannot be found.

    Args:
        module: the dotted name of the module; its top-level module is a key of ``EXTRAS``.
    """
    extra = EXTRAS[module.partition(".")[0]]
    return MissingPackageError(
        f"{module} is not installed: run pip install 'mcontroller[cpu]' for CPU wheels of everything, or pip install "
        f"'mcontroller[{extra}]' for this part, or put your own build on PYTHONPATH (docs/index.md)",
        name=module,
        extra=extra,
    )
