"""Import of the classes that command-line arguments name."""

from __future__ import annotations

import importlib

from mcontroller.errors import ConfigError

__all__ = ["load_class"]


def load_class(path: str, key: str) -> type:
    """Import a class.

    Args:
        path: the class, as ``package.module:Class``.
        key: the argument that names it, for error messages.

    Raises:
        ConfigError: the path has another form, cannot be imported, or is not a class.
    """
    module, separator, name = path.partition(":")
    if not separator or not module or not name:
        raise ConfigError(f"{key} is {path!r}; expected package.module:Class", key=key, value=path)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} is {path!r}, which cannot be imported: {error}", key=key, value=path) from error
    if not isinstance(found, type):
        raise ConfigError(
            f"{key} is {path!r}, which is a {type(found).__name__}; expected a class", key=key, value=path
        )
    return found
