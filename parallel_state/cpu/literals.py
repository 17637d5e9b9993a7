"""An import hook that replaces ``"cuda"`` in Megatron's sources with the device that stands for the GPU.

The literals are replaced when a module is compiled, by ``parallel_state.cpu.device.current.type``: ``"cpu"``, or
``"meta"`` in a dry run. The bytecode is cached next to Python's own under a different tag: Python's own cache stays as
it is, and an import takes as long as without the hook.
"""

from __future__ import annotations

import ast
import importlib.util
import marshal
import re
import struct
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from parallel_state.patches.import_hook import ImportHook, Patch

PACKAGES = ("megatron", "mbridge")
"""The top-level packages whose sources are always rewritten; ``add_packages`` adds others."""

_packages = set(PACKAGES)

_CURRENT = "_device_for_cuda"
"""The name under which rewritten modules import ``parallel_state.cpu.device.current``."""
_DEVICE = re.compile(r"cuda(:\d+)?")
_TENSOR_TYPE = re.compile(r"torch\.cuda\.(\w*Tensor[,.]?\s*)")
# The tag changes with this file: bytecode that other rules produced is never read.
_CACHE_TAG = "cpu" + importlib.util.source_hash(Path(__file__).read_bytes()).hex()[:8]


def install_hook(patches: Mapping[str, Patch]) -> None:
    """Rewrite the sources of the packages when they are imported, and patch their modules.

    Args:
        patches: module name -> function that is called with the module right after its import.
    """

    def patch(module: ModuleType) -> None:
        if module.__name__ in patches:
            patches[module.__name__](module)

    sys.meta_path.insert(0, _RewritingHook(is_rewritten, patch))


def add_packages(names: Iterable[str]) -> None:
    """Rewrite the sources of more packages or modules when they are imported.

    Args:
        names: dotted names; the modules below them are included.
    """
    _packages.update(names)


def is_rewritten(fullname: str) -> bool:
    """Whether the source of a module is rewritten when it is imported."""
    parts = fullname.split(".")
    return any(".".join(parts[: i + 1]) in _packages for i in range(len(parts)))


class _RewritingHook(ImportHook):
    def loader(self, spec: Any) -> Any:
        return _Loader(spec.name, spec.path) if type(spec) is SourceFileLoader else spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        cache = importlib.util.cache_from_source(path, optimization=_CACHE_TAG)
        stats = self.path_stats(path)
        header = importlib.util.MAGIC_NUMBER + struct.pack("<dQ", stats["mtime"], stats["size"])
        code = self._read_cache(cache, header)
        if code is None:
            code = compile(rewrite(self.get_data(path), path), path, "exec", dont_inherit=True)
            if not sys.dont_write_bytecode:
                # set_data writes a temporary file and renames it: a concurrent reader sees the whole file or none
                self.set_data(cache, header + marshal.dumps(code))
        return code

    def _read_cache(self, cache: str, header: bytes) -> CodeType | None:
        try:
            data = self.get_data(cache)
        except OSError:
            return None
        return marshal.loads(memoryview(data)[len(header) :]) if data.startswith(header) else None


def rewrite(source: bytes, filename: str = "<source>") -> ast.Module:
    """Parse ``source`` and replace its devices, tensor types and pinned memory with the CPU's.

    Args:
        source: Python source.
        filename: the name that a SyntaxError reports.
    """
    tree = ast.parse(source, filename)
    rewriter = _Rewriter()
    rewriter.visit(tree)
    if rewriter.has_devices:
        first = next((index for index, node in enumerate(tree.body) if not _must_come_first(node)), 0)
        tree.body.insert(first, ast.ImportFrom("parallel_state.cpu.device", [ast.alias("current", _CURRENT)], 0))
    return ast.fix_missing_locations(tree)


def _must_come_first(node: ast.stmt) -> bool:
    """Whether a statement is a docstring or a ``from __future__`` import."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class _Rewriter(ast.NodeTransformer):
    def __init__(self) -> None:
        self.has_devices = False

    def _current(self, node: ast.expr, attribute: str = "type") -> ast.Attribute:
        self.has_devices = True
        name = ast.Name(_CURRENT, ast.Load())
        return ast.copy_location(ast.Attribute(name, attribute, ast.Load()), node)

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, str):
            if _DEVICE.fullmatch(node.value):
                return self._current(node)
            if _TENSOR_TYPE.fullmatch(node.value):
                name = ast.Constant(_TENSOR_TYPE.sub(r"\1", node.value))
                return ast.copy_location(ast.BinOp(self._current(node, "tensors"), ast.Add(), name), node)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        self.generic_visit(node)
        if node.arg == "pin_memory" and isinstance(node.value, ast.Constant) and node.value.value is True:
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        first = node.values[0] if len(node.values) == 2 else None
        if isinstance(first, ast.Constant) and first.value == "cuda:":
            return self._current(node)
        return node  # text for people, even if it contains "cuda"

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if isinstance(node.op, ast.Mod) and _is_constant(node.left, "cuda:%d", "cuda:%s"):
            return self._current(node)
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Call(self, node: ast.Call) -> ast.expr:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "format" and _is_constant(getattr(node.func, "value", None), "cuda:{}"):
            return self._current(node)
        if called == "device" and len(node.args) == 2 and _is_constant(node.args[0], "cuda"):
            del node.args[1]  # the index
        return self.generic_visit(node)  # type: ignore[return-value]


def _is_constant(node: ast.expr | None, *values: str) -> bool:
    return isinstance(node, ast.Constant) and node.value in values
