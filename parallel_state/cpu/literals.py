"""An import hook that reads ``"cpu"`` where Megatron's sources say ``"cuda"``.

The literals are rewritten when a module is compiled, so that a run pays nothing for it, and any thread sees the same.
The bytecode is cached beside Python's own under a tag of ours: the stock bytecode is never touched, and an import
takes as long as a stock one.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import re
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGES = ("megatron", "mbridge")
"""Whose sources are rewritten: these packages and all below them."""

Patch = Callable[[Any], None]

_DEVICE = re.compile(r"cuda(:\d+)?")
_TENSOR_TYPE = re.compile(r"torch\.cuda\.(\w*Tensor[,.]?\s*)")
# A change of the rules below is a change of this file, and with it of the tag: no stale bytecode is ever read.
_CACHE_TAG = "cpu" + importlib.util.source_hash(Path(__file__).read_bytes()).hex()[:8]


def hook(patches: Mapping[str, Patch]) -> None:
    """From now on import ``PACKAGES`` rewritten, and call ``patches[name](module)`` right after module ``name``."""
    sys.meta_path.insert(0, _Finder(patches))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self.patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self.patches.get(fullname))
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, patch: Patch | None) -> None:
        super().__init__(fullname, path)
        self._patch = patch

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if self._patch is not None:
            self._patch(module)

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        cache = importlib.util.cache_from_source(path, optimization=_CACHE_TAG)
        stats = self.path_stats(path)
        header = importlib.util.MAGIC_NUMBER + struct.pack("<dQ", stats["mtime"], stats["size"])
        code = self._read_cache(cache, header)
        if code is None:
            code = compile(rewritten(self.get_data(path), path), path, "exec", dont_inherit=True)
            if not sys.dont_write_bytecode:
                # set_data writes a temporary file and renames it: a concurrent reader sees all of it or none.
                self.set_data(cache, header + marshal.dumps(code))
        return code

    def _read_cache(self, cache: str, header: bytes) -> CodeType | None:
        try:
            data = self.get_data(cache)
        except OSError:
            return None
        return marshal.loads(memoryview(data)[len(header) :]) if data.startswith(header) else None


def rewritten(source: bytes, filename: str = "<source>") -> ast.Module:
    """``source`` parsed, with devices, tensor types and pinned memory turned into the CPU's."""
    return ast.fix_missing_locations(_Rewriter().visit(ast.parse(source, filename)))


class _Rewriter(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str):
            if _DEVICE.fullmatch(node.value):
                return ast.copy_location(ast.Constant("cpu"), node)
            if _TENSOR_TYPE.fullmatch(node.value):
                return ast.copy_location(ast.Constant(_TENSOR_TYPE.sub(r"torch.\1", node.value)), node)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        self.generic_visit(node)
        if node.arg == "pin_memory" and isinstance(node.value, ast.Constant) and node.value.value is True:
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        return node  # text for people, even where it says "cuda"
