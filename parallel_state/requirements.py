"""Report a missing package in one line that contains the command to install it.

torch, tensordict, megatron-core and Transformer Engine are not hard dependencies of the distribution, because teams
build them for their own images (see docs/install.md).
"""

from __future__ import annotations

import importlib.util

from parallel_state.errors import MissingPackageError

__all__ = ["missing_package", "require"]

EXTRAS = {"torch": "torch", "tensordict": "torch", "megatron": "megatron"}
"""Top-level module -> the extra of this distribution that installs it."""


def require(*modules: str) -> None:
    """Raise an error that names the first of these modules that cannot be found; import none of them.

    Args:
        modules: Dotted module names, such as ``"torch"`` or ``"megatron.core"``.

    Raises:
        MissingPackageError: A module is not installed and not on PYTHONPATH.
    """
    for module in modules:
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the parent package of a dotted name is missing
            found = False
        if not found:
            raise missing_package(module)


def missing_package(module: str) -> MissingPackageError:
    """Return the error for a module that cannot be found.

    Args:
        module: The dotted name of the module; its top-level module is a key of ``EXTRAS``.
    """
    extra = EXTRAS[module.partition(".")[0]]
    return MissingPackageError(
        f"{module} is not installed: run pip install 'mcontroller[cpu]' for CPU wheels of everything, or pip install "
        f"'mcontroller[{extra}]' for this part, or put your own build on PYTHONPATH (docs/install.md)",
        name=module,
        extra=extra,
    )
