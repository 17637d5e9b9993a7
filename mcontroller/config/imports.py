"""Import of functions and modules that a configuration names, and of optional packages that it needs."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mcontroller.config.checks import close_names
from mcontroller.errors import ConfigError


def import_object(path: str, key: str) -> Any:
    """Return an attribute of a module.

    Args:
        path: ``package.module:name``, or ``directory/file.py:name``.
        key: the configuration key whose value it is, for error messages.

    Raises:
        ConfigError: the path has another form, its module cannot be imported, or has no such attribute.
    """
    module_path, separator, name = path.rpartition(":")
    if not separator or not module_path or not name:
        raise ConfigError(f"{key} is {path!r}; expected package.module:name or file.py:name", key=key, value=path)
    module = import_module(module_path, key)
    if not hasattr(module, name):
        public = [variable for variable in vars(module) if not variable.startswith("_")]
        raise ConfigError(
            f"{key} is {path!r}, and {module_path} has no {name!r}{close_names(name, public)}", key=key, value=path
        )
    return getattr(module, name)


def import_class(path: str, key: str) -> type:
    """Return a class of a module, with the arguments and errors of ``import_object``."""
    imported = import_object(path, key)
    if not isinstance(imported, type):
        raise ConfigError(
            f"{key} is {path!r}, which is a {type(imported).__name__}; expected a class", key=key, value=path
        )
    return imported


def import_module(path: str, key: str) -> ModuleType:
    """Return a module.

    Args:
        path: its dotted name, or the path of its file, ending in ``.py``.
        key: the configuration key whose value it is, for error messages.

    Raises:
        ConfigError: it cannot be imported; the message has the error of the import.
    """
    try:
        return _module_of_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    except Exception as error:  # the module of a user can raise anything while it is imported
        raise ConfigError(
            f"{key} is {path!r}, which cannot be imported: {type(error).__name__}: {error}", key=key, value=path
        ) from error


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


def absolute_path_of(path: str) -> str:
    """Return the path of a module or of an object with the path of a file made absolute."""
    file, separator, name = path.partition(".py")
    return f"{Path(file + separator).resolve()}{name}" if separator and name[:1] in ("", ":") else path


def _module_of_file(path: Path) -> ModuleType:
    """Return the module of a file, which is executed once; modules next to it can be imported by it."""
    file = path.resolve()
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise FileNotFoundError(f"there is no file {str(file)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
