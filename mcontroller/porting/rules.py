"""The differences that a ported worker meets, as rules that the verb ``port`` reports and docs/porting.md explains."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "RULES",
    "Difference",
    "PortCheck",
    "PortContext",
    "PortFinding",
    "attribute_of",
    "dotted",
    "finding",
    "keyword_of",
]


@dataclass(frozen=True)
class Difference:
    """One difference.

    Attributes:
        kind: ``silent`` if the line runs here and means something else; ``error`` if it must change to run.
        text: what is different, in one sentence.
    """

    kind: Literal["silent", "error"]
    text: str


RULES: Mapping[str, Difference] = {
    "union": Difference("silent", "union returns a new batch and leaves its first argument as it is"),
    "metrics": Difference("silent", "after a call, meta_info['metrics'] lists the values of all returning ranks"),
    "shared-meta-info": Difference("silent", "a part of a batch has its own meta_info: the write stays in the part"),
    "shared-columns": Difference("silent", "select returns a batch with columns of its own: the write stays in it"),
    "nested-lists": Difference("silent", "a list under non_tensors becomes a 1-D column, whatever its entries are"),
    "auto-padding": Difference("silent", "padding is allowed by DataProtoConfig.auto_padding, not by the environment"),
    "stages-as-shards": Difference("silent", "results of MEGATRON_PP_AS_DP are in the order of the shards, not ranks"),
    "one-per-stage": Difference("silent", "MEGATRON_PP_ONLY returns one result for each stage, also with cp > 1"),
    "rank-zero-arguments": Difference(
        "silent", "with Execute.RANK_ZERO, rank 0 gets the arguments themselves, not lists"
    ),
    "device-index": Difference(
        "silent", "a process sees the GPUs of all ranks of its group on the node, not only its own"
    ),
    "visible-devices": Difference(
        "silent", "CUDA_VISIBLE_DEVICES lists the GPUs of all ranks of the group on the node"
    ),
    "port-number": Difference("silent", "the port of get_master_addr_port is an int"),
    "errors": Difference("silent", "an exception of a worker arrives as WorkerError, and ends the group"),
    "colocate-count": Difference("silent", "max_colocate_count is 1 by default: one group for each pool"),
    "distributed": Difference(
        "silent", "MegatronWorker has already joined torch.distributed and made Megatron's groups"
    ),
    "import": Difference("error", "the name is imported from another module"),
    "super-init": Difference("error", "MegatronWorker's __init__ takes the sizes of the axes"),
    "default-mode": Difference(
        "error", "the default mode takes lists with an entry for each rank, and rejects other values"
    ),
    "futures": Difference("error", "a call that is not waited for returns a Future, not Ray's references"),
    "registration": Difference("error", "the registration of a method is an object with attributes, not a dict"),
    "register-center": Difference("error", "there is no register center: the group starts and connects its processes"),
    "group-arguments": Difference("error", "the group does not take this argument"),
    "direct-rollout": Difference("error", "Ray's handle of a process has no method of the worker"),
    "mode-name": Difference("error", "a mode keeps the name that it is registered with; it is not put in upper case"),
}
"""The differences by name. docs/porting.md has a row for each."""


@dataclass(frozen=True, order=True)
class PortFinding:
    """A line of a ported file that must change, or that means something else here.

    Attributes:
        line: its number.
        rule: name of the difference.
        replacement: the code to write instead, or what to do.
    """

    line: int
    rule: str
    replacement: str


@dataclass(frozen=True)
class PortContext:
    """Where a node of the syntax tree is.

    Attributes:
        bases: names of the base classes of the enclosing class.
        parameters: names of the parameters of the enclosing function.
        parts: names that are bound to a part of a batch in the enclosing function, with the method that returned it.
        calls: names that are bound to the result of a call that is not waited for.
        parent: the enclosing node.
    """

    bases: tuple[str, ...] = ()
    parameters: frozenset[str] = frozenset()
    parts: Mapping[str, ast.expr] = field(default_factory=dict)
    calls: frozenset[str] = frozenset()
    parent: ast.AST | None = None


PortCheck = Callable[[ast.AST, PortContext], Iterator[PortFinding]]
"""Yields what is different at one node."""


def finding(node: ast.AST, rule: str, replacement: str) -> PortFinding:
    """Return a finding at the line of a node."""
    return PortFinding(getattr(node, "lineno", 0), rule, replacement)


def dotted(node: ast.AST | None) -> str:
    """Return ``a.b.c`` for a name or an attribute of a name; the empty string for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def attribute_of(call: ast.AST) -> str:
    """Return the last name of the function of a call, ``c`` for ``a.b.c(...)``; the empty string for anything else."""
    function = call.func if isinstance(call, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def keyword_of(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword argument; None without it."""
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
