"""The part of a file that a program runs: the functions that are called, and what runs when the file is imported.

A program computes the same with another version of the file if that part is the same.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

_TOOL = 4  # of sys.monitoring; others are those of debuggers, coverage and profilers
_WITH_CODE = (ast.FunctionDef, ast.AsyncFunctionDef)


@contextmanager
def recorded_calls() -> Iterator[dict[str, set[str]]]:
    """Yield the names of the functions that this process calls in the block, by file; empty before Python 3.12.

    A function inside another counts as the outermost.
    """
    called: dict[str, set[str]] = defaultdict(set)
    if sys.version_info < (3, 12):
        yield called
        return
    monitoring = sys.monitoring

    def add(code: CodeType, offset: int) -> Any:
        called[code.co_filename].add(code.co_qualname.partition(".<locals>")[0])
        return monitoring.DISABLE  # for this function: the first call is enough

    monitoring.use_tool_id(_TOOL, "mcontroller verify")
    monitoring.register_callback(_TOOL, monitoring.events.PY_START, add)
    monitoring.set_events(_TOOL, monitoring.events.PY_START)
    try:
        yield called
    finally:
        monitoring.free_tool_id(_TOOL)


def code_by_function(source: str) -> dict[str, str]:
    """Return hashes of the code of a file by the name of the outermost function, such as ``MLP.forward``.

    The name "" has what runs on import: all but the bodies of functions. Comments and docstrings do not count.
    """
    module = ast.parse(source)
    for node in ast.walk(module):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [part for part in body if not _is_text(part)]  # type: ignore[attr-defined]
    bodies: dict[str, str] = defaultdict(str)
    _take_bodies(module, "", bodies)
    return {name: hashlib.sha256(code.encode()).hexdigest() for name, code in {**bodies, "": ast.dump(module)}.items()}


def _take_bodies(node: ast.AST, prefix: str, bodies: dict[str, str]) -> None:
    """Move the code of functions from a tree to ``bodies``; a property with a setter has two of one name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _WITH_CODE):
            bodies[prefix + child.name] += "".join(map(ast.dump, child.body))
            child.body = []
        else:
            _take_bodies(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix, bodies)


def _is_text(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str)
