"""Patch modules when they are imported, or at once if they are imported already; call functions before an import."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, NamespaceLoader
from types import ModuleType
from typing import Any

Patch = Callable[[Any], None]
"""Called with a module right after its import."""


def patch_modules(patches: Mapping[str, Patch]) -> None:
    """Apply patches to modules that are imported, and to the others when they are imported.

    Args:
        patches: module name -> function that is called with the module.
    """
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    later = {name: patch for name, patch in patches.items() if name not in sys.modules}
    sys.meta_path.insert(0, ImportHook(later.__contains__, lambda module: later[module.__name__](module)))


def call_before_import(name: str, function: Callable[[], object]) -> None:
    """Call a function before a module is imported for the first time; at once if it is imported already."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Before(name, function))


class _Before(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self._name, self._function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        try:
            self._function()
        except BaseException:
            sys.meta_path.insert(0, self)
            raise
        return importlib.util.find_spec(fullname)  # by the finders that the function may have added


class ImportHook(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and calls a function with a module right after its code has run.

    Args:
        wanted: whether the function is called with a module, by its name.
        loaded: the function.
    """

    def __init__(self, wanted: Callable[[str], bool], loaded: Callable[[ModuleType], None]) -> None:
        self._wanted, self._loaded = wanted, loaded
        self._finding: set[str] = set()

    def loader(self, spec: Any) -> Any:
        """Return the loader to use in place of the one that was found; by default that one."""
        return spec

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that another finder finds, with a loader that calls the function."""
        if fullname in self._finding or not self._wanted(fullname):
            return None
        self._finding.add(fullname)
        try:
            specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((candidate for candidate in specs if candidate is not None), None)
        finally:
            self._finding.remove(fullname)
        if spec is not None:
            if spec.loader is None:  # of a package without __init__.py
                spec.loader = NamespaceLoader(fullname, list(spec.submodule_search_locations or ()), self.find_spec)
            spec.loader = self._calling(self.loader(spec.loader))
        return spec

    def _calling(self, loader: Any) -> Any:
        execute = loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self._loaded(module)

        loader.exec_module = execute_and_call
        return loader
