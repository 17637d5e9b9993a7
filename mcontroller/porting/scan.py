"""Read the source of a ported file, and find what must change and what means something else here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from mcontroller.porting.batch_checks import BATCH_CHECKS
from mcontroller.porting.call_checks import CALL_CHECKS, is_unawaited
from mcontroller.porting.process_checks import PROCESS_CHECKS
from mcontroller.porting.rules import PortContext, PortFinding, attribute_of, dotted

__all__ = ["scan"]

CHECKS = (*BATCH_CHECKS, *CALL_CHECKS, *PROCESS_CHECKS)

PARTS = frozenset(
    {"select", "slice", "select_idxs", "chunk", "split", "repeat", "sample_level_repeat", "unfold_column_chunks"}
    | {"make_iterator", "concat", "pad_dataproto_to_divisor", "unpad_dataproto"}
)
"""Methods and functions whose result shares ``meta_info`` with the whole batch in other implementations."""


def scan(source: str) -> list[PortFinding]:
    """Return what is different in a file of Python source, by line.

    Raises:
        SyntaxError: The source is not Python.
    """
    tree = ast.parse(source)
    found = {each for node, context in _nodes(tree, _inside(tree, PortContext())) for each in _checked(node, context)}
    return sorted(found)


def _checked(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    for check in CHECKS:
        yield from check(node, context)


def _nodes(node: ast.AST, context: PortContext) -> Iterator[tuple[ast.AST, PortContext]]:
    """Yield every node below ``node`` with its context."""
    for child in ast.iter_child_nodes(node):
        yield child, replace(context, parent=node)
        yield from _nodes(child, _inside(child, context))


def _inside(node: ast.AST, context: PortContext) -> PortContext:
    """Return the context of the nodes inside a node."""
    if isinstance(node, ast.ClassDef):
        return replace(context, bases=tuple(dotted(base).rpartition(".")[2] for base in node.bases))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
        bound = list(_bindings(node))
        parts = {name: value for name, value in bound if _is_part(value)}
        calls = frozenset(name for name, value in bound if is_unawaited(value))
        parameters = frozenset[str]()
        if not isinstance(node, ast.Module):
            listed = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            parameters = frozenset(each.arg for each in listed)
        return replace(context, parts=parts, calls=calls, parameters=parameters)
    return context


def _bindings(scope: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that are assigned in a scope, or are the target of a loop, with what they are bound to."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((dotted(name), node.value) for name in _targets(target))
        elif isinstance(node, ast.For):
            yield from ((dotted(name), node.iter) for name in _targets(node.target))


def _targets(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def _is_part(value: ast.expr) -> bool:
    """Return whether an expression may be a part of a batch: what a loop passes may be a mini-batch."""
    return attribute_of(value) in PARTS or isinstance(value, ast.Subscript | ast.Name | ast.Attribute)
