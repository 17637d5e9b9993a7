"""Patch modules when they are imported, or at once if they are imported already."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

__all__ = ["Patch", "PatchingFinder", "PatchingLoader", "patch_modules"]

Patch = Callable[[Any], None]
"""Called with a module right after its import."""


def patch_modules(patches: Mapping[str, Patch]) -> None:
    """Apply patches to modules that are imported, and to the others when they are imported.

    Args:
        patches: Module name -> function that is called with the module.
    """
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, PatchingFinder({name: patch for name, patch in patches.items() if name not in sys.modules}))


class PatchingLoader(importlib.machinery.SourceFileLoader):
    """Load a module from its source, then patch it."""

    def __init__(self, fullname: str, path: str, patch: Patch | None) -> None:
        super().__init__(fullname, path)
        self._patch = patch

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, then its patch."""
        super().exec_module(module)
        if self._patch is not None:
            self._patch(module)


class PatchingFinder(importlib.abc.MetaPathFinder):
    """Find modules as the other finders do, with a loader that patches them."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self.patches = patches

    def wants(self, fullname: str) -> bool:
        """Whether the module is loaded with ``loader``."""
        return fullname in self.patches

    def loader(self, fullname: str, path: str) -> PatchingLoader:
        """Return the loader of a module."""
        return PatchingLoader(fullname, path, self.patches.get(fullname))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that another finder finds, with a patching loader if it is loaded from source."""
        if not self.wants(fullname):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = self.loader(spec.loader.name, spec.loader.path)
        return spec
