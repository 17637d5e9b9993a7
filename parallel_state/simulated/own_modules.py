"""Packages that every simulated rank imports for itself: module globals, classes and their attributes are its own.

A module is the same object on every rank, with other contents, so that functions and modules that were imported before
the run see the contents of the running rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection
from types import FunctionType, ModuleType
from typing import Any

from parallel_state.errors import ParallelStateError
from parallel_state.patches.import_hook import ImportHook

Contents = dict[str, tuple[ModuleType, dict[str, Any]]]
"""Name of a module -> the module and its globals."""


class OwnModules:
    """The modules of some packages, as a part of the state of a rank: a new rank has not imported any.

    Args:
        packages: names of packages or modules; modules below them are included.

    Raises:
        ParallelStateError: there is no such package.
    """

    def __init__(self, packages: Collection[str]) -> None:
        if isinstance(packages, str):
            raise ParallelStateError(f"modules must be a list of names, got the string {packages!r}")
        for name in packages:
            if name not in sys.modules and importlib.util.find_spec(name) is None:
                raise ParallelStateError(f"modules={list(packages)}: there is no module {name!r} in sys.path")
        self._packages = tuple(packages)
        self._below = tuple(f"{package}." for package in packages)
        self._objects: dict[str, ModuleType] = {}  # all that any rank has imported
        self._add_imported()
        self._imported_before = list(self._objects)

    def has(self, name: str) -> bool:
        """Whether every rank has a module of this name to itself."""
        return name in self._packages or name.startswith(self._below)

    def fresh(self) -> Contents:
        """Return the contents of a new rank: nothing is imported."""
        return {}

    def read(self) -> Contents:
        """Return the contents that the modules have now."""
        names = [name for name in self._objects if name in sys.modules]
        return {name: (sys.modules[name], dict(vars(sys.modules[name]))) for name in names}

    def write(self, value: Contents) -> None:
        """Give every module the contents of a rank, and remove those that the rank has not imported."""
        for name in self._objects:
            sys.modules.pop(name, None)
        for name, (module, contents) in value.items():
            sys.modules[name] = module
            vars(module).clear()
            vars(module).update(contents)

    def import_all(self) -> None:
        """Import on the running rank what this process had imported before, in the same order."""
        for name in self._imported_before:
            importlib.import_module(name)

    def hook(self) -> ImportHook:
        """Return an import hook under which all ranks import into the same module objects."""
        self._add_imported()
        return _SameObjects(self.has, self._objects)

    def on_this_rank(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the running rank's function of the same name, if the function is global in one of the modules."""
        if not isinstance(function, FunctionType) or not self.has(function.__module__):
            return function
        current: Any = getattr(sys.modules[function.__module__], function.__qualname__, function)
        return current  # type: ignore[no-any-return]

    def _add_imported(self) -> None:
        if self._packages:  # else thousands of names would be compared with none
            self._objects.update((name, module) for name, module in list(sys.modules.items()) if self.has(name))


class _SameObjects(ImportHook):
    """Executes a module that another rank has imported in the object of that import, without its contents."""

    def __init__(self, wanted: Callable[[str], bool], objects: dict[str, ModuleType]) -> None:
        super().__init__(wanted, lambda module: None)
        self._objects = objects

    def loader(self, spec: Any) -> Any:
        create = spec.create_module

        def same_object(spec: Any) -> ModuleType:
            module = self._objects.get(spec.name)
            if module is None:
                module = self._objects[spec.name] = create(spec) or ModuleType(spec.name)
            vars(module).clear()
            return module

        spec.create_module = same_object
        return spec
