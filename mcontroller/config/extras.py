"""Import of optional packages, with an error that names the extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from mcontroller.errors import ConfigError

__all__ = ["import_extra"]


def import_extra(module: str, extra: str, key: str) -> ModuleType:
    """Return a module of an optional package.

    Args:
        module: its dotted name.
        extra: the extra of this project that installs it.
        key: the configuration key that needs it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"{key} needs the module {missing.name!r}: pip install 'mcontroller[{extra}]'", key=key, value=extra
        ) from missing
