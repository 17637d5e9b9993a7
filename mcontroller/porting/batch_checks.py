"""What is different in the use of batches: union, metrics, parts that share memory, columns of lists."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from mcontroller.porting.rules import PortCheck, PortContext, PortFinding, attribute_of, dotted, finding, keyword_of

__all__ = ["BATCH_CHECKS"]

UNIONS = frozenset({"union_tensor_dict", "union_numpy_dict"})
ARRAYS = frozenset({"array", "asarray", "empty", "fromiter", "full", "arange", "zeros", "ones", "concatenate"})


def check_union(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find unions whose first argument is expected to change."""
    if not isinstance(node, ast.Call):
        return
    name = attribute_of(node)
    if name == "union" and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
        changed: ast.expr = node.func.value
    elif name in UNIONS and node.args:
        changed = node.args[0]
    else:
        return
    text, parent = ast.unparse(changed), context.parent
    target = ast.unparse(parent.targets[0]) if isinstance(parent, ast.Assign) else ""
    kept = isinstance(parent, ast.Expr) or (target not in ("", text) and dotted(changed))
    passed_on = isinstance(parent, ast.Return) and text.partition(".")[0] in context.parameters
    if kept or passed_on:
        yield finding(node, "union", f"{text} = {ast.unparse(node)}")


def check_metrics(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find uses of the metrics in ``meta_info``: as read by the caller, and as returned by a worker."""
    advice = "reduce the list of all returning ranks: sum(values) / len(values), or values[0] for the first rank's"
    if isinstance(node, ast.Subscript) and _is_meta_info(node.value) and _constant(node.slice) == "metrics":
        yield finding(node, "metrics", advice)
    elif isinstance(node, ast.Call):
        method, first = node.func, node.args[0] if node.args else None
        if attribute_of(node) in ("get", "pop") and isinstance(method, ast.Attribute) and _is_meta_info(method.value):
            if _constant(first) == "metrics":
                yield finding(node, "metrics", advice)
            return
        info = keyword_of(node, "meta_info")
        if isinstance(info, ast.Dict) and any(_constant(key) == "metrics" for key in info.keys):
            yield finding(info, "metrics", f"in the caller: {advice}")


def check_writes_to_parts(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find writes to a part of a batch that are expected to reach the whole batch."""
    for name, attribute in _written(node):
        source = context.parts.get(name)
        if source is None:
            continue
        whole = _whole_of(source)
        if attribute == "meta_info":
            yield finding(node, "shared-meta-info", f"write to the meta_info of {whole} too, if it is read from there")
        elif attribute_of(source) == "select" and not _selects(source, attribute):
            yield finding(node, "shared-columns", f"write to {whole}.{attribute} too, if it is read from there")


def check_lists(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find non-tensor columns that may be made of lists."""
    if not (isinstance(node, ast.Call) and attribute_of(node) == "from_dict"):
        return
    columns = keyword_of(node, "non_tensors") or (node.args[1] if len(node.args) > 1 else None)
    if columns is None or _constant(columns, missing=...) is None:
        return
    values = columns.values if isinstance(columns, ast.Dict) else [None]
    if not all(value is not None and attribute_of(value) in ARRAYS for value in values):
        text = "np.array(values, dtype=object) around each list of lists of equal lengths, for a 2-D column"
        yield finding(columns, "nested-lists", text)


def check_auto_padding(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find the names by which padding is allowed elsewhere."""
    if _constant(node) in ("VERL_AUTO_PADDING", "_verl_auto_padding"):
        yield finding(node, "auto-padding", "DataProtoConfig.auto_padding = True, DataProtoConfig.auto_padding_key")


def _is_meta_info(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta_info"


def _constant(node: ast.AST | None, missing: object = "") -> object:
    return node.value if isinstance(node, ast.Constant) else missing


def _written(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (name, field) for ``name.field[...] = ...``, ``name.field.update(...)`` and ``name.field.pop(...)``."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = [target.value for target in node.targets if isinstance(target, ast.Subscript)]
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
        targets = [node.target.value]
    elif isinstance(node, ast.Delete):
        targets = [target.value for target in node.targets if isinstance(target, ast.Subscript)]
    elif isinstance(node, ast.Call) and attribute_of(node) in ("update", "pop", "setdefault", "clear", "set"):
        targets = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    for target in targets:
        if isinstance(target, ast.Attribute) and target.attr in ("meta_info", "batch", "non_tensor_batch"):
            yield dotted(target.value), target.attr


def _whole_of(source: ast.expr) -> str:
    function = source.func if isinstance(source, ast.Call) else source
    return ast.unparse(function.value if isinstance(function, ast.Attribute | ast.Subscript) else function)


def _selects(call: ast.expr, field: str) -> bool:
    """Return whether ``select`` names columns of this field, which makes a dict of columns of its own elsewhere too."""
    name, position = ("batch_keys", 0) if field == "batch" else ("non_tensor_batch_keys", 1)
    given = keyword_of(call, name) if isinstance(call, ast.Call) else None
    return given is not None or (isinstance(call, ast.Call) and len(call.args) > position)


BATCH_CHECKS: tuple[PortCheck, ...] = (
    check_union,
    check_metrics,
    check_writes_to_parts,
    check_lists,
    check_auto_padding,
)
