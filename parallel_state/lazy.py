"""Import the public names of a package on first use.

A package lists its public names once, in the form that type checkers read, and passes the rest to ``lazy_exports``::

    if TYPE_CHECKING:
        from package.module import Name as Name
    else:
        __getattr__, __dir__, __all__ = lazy_exports(__name__)

A module that registers functions of tensors, and is read by configurations, imports torch when one is called::

    if TYPE_CHECKING:
        import torch
    else:
        torch = Lazy("torch")
"""

from __future__ import annotations

import ast
import importlib
import linecache
import sys
from collections.abc import Callable
from typing import Any

from parallel_state.requirements import naming_extras


class Lazy:
    """A module, or one object of it, that is imported when it is called or an attribute of it is read.

    Args:
        module: the dotted name of the module.
        name: the name of the object in the module; "" for the module itself.
    """

    def __init__(self, module: str, name: str = "") -> None:
        self._source = module, name

    def _load(self) -> Any:
        module, name = self._source
        loaded = importlib.import_module(module)
        return getattr(loaded, name) if name else loaded

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._load(), attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object."""
        return self._load()(*args, **kwargs)


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for the ``__init__`` of a package.

    The exported names are those that the ``__init__`` imports under ``if TYPE_CHECKING:``. Each is imported from the
    module named there when it is first used.

    Args:
        package: the package's ``__name__``.
    """
    sources = _type_checking_imports(package)

    def load(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        module, original = sources[name]
        with naming_extras():
            value = getattr(importlib.import_module(module), original)
        setattr(sys.modules[package], name, value)
        return value

    names = sorted(sources)
    return load, lambda: names, names


def _type_checking_imports(package: str) -> dict[str, tuple[str, str]]:
    """Return each name imported under ``if TYPE_CHECKING:``, with its module and its name there."""
    module = sys.modules[package]
    # linecache uses the package's loader, so a package inside a zip archive is read too
    source = "".join(linecache.getlines(module.__file__ or "", vars(module)))
    return {
        alias.asname or alias.name: (statement.module or "", alias.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
