"""What ranks write into module globals and class attributes that all ranks of the process share."""

from __future__ import annotations

import os
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel_state.simulated.errors import SharedStateWarning

_PACKAGES = ("parallel_state", "mcontroller", "workers", "trainer")
_NOT_OF_A_USER = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(Path(__file__).parents[2] / name) + os.sep for name in _PACKAGES),
)
_ALSO = ("torch.distributed", "torch.distributed.distributed_c10d")
_SHOWN = 5

SharedValues = dict[Any, dict[str, Any]]
"""Module or class -> its attributes."""


def shared_values(is_own: Callable[[str], bool]) -> SharedValues:
    """Return the values in the user's modules and the classes that they define, and in torch.distributed.

    Args:
        is_own: whether every rank has a module to itself, by its name.
    """
    owners: list[Any] = [sys.modules[name] for name in _ALSO]
    for name, module in list(sys.modules.items()):
        if is_users(module) and not is_own(name):
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            owners += [module, *(one for one in classes if one.__module__ == name)]
    return {owner: dict(vars(owner)) for owner in owners}


def warn_of_writes(before: SharedValues, ranks: int) -> None:
    """Warn of what ranks have rebound since ``shared_values``; what an import or a warning adds does not count."""
    written = [
        f"{_name(owner)}.{name}"
        for owner, values in before.items()
        for name, value in (values | vars(owner)).items()
        if value is not values.get(name, before) and not isinstance(value, types.ModuleType) and name[:2] != "__"
    ]
    if written:
        more = f"; and {len(written) - _SHOWN} more" if len(written) > _SHOWN else ""
        warnings.warn(
            f"ranks wrote what all {ranks} simulated ranks share, and processes do not: {', '.join(written[:_SHOWN])}"
            f"{more}; name the modules in modules=[...], so that each rank has its own",
            SharedStateWarning,
            stacklevel=4,
        )


def _name(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, types.ModuleType) else f"{owner.__module__}.{owner.__qualname__}"


def is_users(module: Any) -> bool:
    """Whether a module is neither of Python, nor installed, nor of this project."""
    path = getattr(module, "__file__", None)
    return isinstance(path, str) and not path.startswith(_NOT_OF_A_USER)
