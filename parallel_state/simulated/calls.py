"""One rank's part in a collective or a transfer: its group, its tensors, and the line of the program that made it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Call", "SharedGroup", "SourceLine", "calling_line", "members_text", "shape_text"]

_SHOWN_MEMBERS = 8
_SHOWN_TENSORS = 4
_HERE = str(Path(__file__).parent)
_ADAPTERS = str(Path(__file__).parents[1] / "cpu")
_LIBRARY, _MEGATRON, _USER = range(3)


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Where a rank made a call.

    Attributes:
        line: ``file:number in function``, outside torch and Megatron; in Megatron if there is no other.
        through: The line of Megatron that called torch for it; None if the program called torch itself.
    """

    line: str
    through: str | None = None

    def __str__(self) -> str:
        return f"{self.line} (through {self.through})" if self.through else self.line


def calling_line() -> SourceLine:
    """Return the line that made the running call."""
    frame = sys._getframe(1)
    inner: tuple[str, int, str] | None = None
    while frame is not None:
        code = frame.f_code
        kind = _kind(code.co_filename)
        if kind != _LIBRARY:
            found = (code.co_filename, frame.f_lineno, code.co_name)
            if kind == _USER:
                return SourceLine(_text(*found), _text(*inner) if inner is not None else None)
            inner = inner or found
        frame = frame.f_back  # type: ignore[assignment]
    return SourceLine(_text(*inner) if inner is not None else "(unknown)")


@functools.cache
def _kind(filename: str) -> int:
    if "/megatron/core/" in filename:
        return _MEGATRON
    inside = filename.startswith((_HERE, _ADAPTERS, os.path.dirname(os.__file__) + os.sep, "<frozen", "<string>"))
    installed = "/site-packages/" in filename
    library = "/torch/" in filename or filename.endswith("/typing_extensions.py")  # decorates functions of torch
    return _LIBRARY if (inside and not installed) or library else _USER


@functools.cache
def _text(filename: str, number: int, function: str) -> str:
    installed = filename.rpartition("/site-packages/")[2]
    if installed == filename:
        relative = os.path.relpath(filename)
        installed = filename if relative.startswith("..") else relative
    return f"{installed}:{number} in {function}"


@dataclass(eq=False, slots=True)
class SharedGroup:
    """What the members of a process group share.

    Attributes:
        name: The name that torch gave it, the same on all members.
        description: ``group_desc`` of ``new_group``; Megatron's name of the group.
        ranks: The global ranks of the members, by rank in the group.
        creator: The rank that created it first.
        line: The line that created it there.
        axis: The axes that its members differ on, such as ``"tp"`` or ``"dp-cp"``; empty if unknown.
        created_by: The members that have created it.
        last_calls: The last collective of each member, by global rank.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    creator: int
    line: SourceLine
    axis: str = ""
    created_by: set[int] = field(default_factory=set)
    last_calls: dict[int, Call] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"group {self.label} {members_text(self.ranks)}"

    @property
    def label(self) -> str:
        """The description, or the name if there is none."""
        return self.description if self.description not in ("", "undefined") else f"{self.name!r}"


def members_text(ranks: Sequence[int]) -> str:
    """Return the ranks of a group, shortened if there are many."""
    if len(ranks) <= _SHOWN_MEMBERS:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[:4]))}, ..., {ranks[-1]}] ({len(ranks)} ranks)"


def shape_text(tensor: torch.Tensor) -> str:
    """Return dtype and shape, such as ``float32[4, 8]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass(eq=False, slots=True)
class Call:
    """One rank's part in a collective or a transfer.

    Attributes:
        operation: The name in torch.distributed.
        rank: The global rank.
        index: The rank in the group.
        group: The group.
        number: The number of the call among the collectives of the group; -1 for a transfer.
        key: What must be equal on all members: reduction, root, sizes and dtypes.
        inputs: The tensors that are read; of a collective in place, also written.
        outputs: The tensors that are written.
        line: The line that made the call.
        options: What messages show and the computation needs: ``op``, ``root``, ``tag``, split sizes.
        peer: Of a transfer, the global rank of the other side; None for any.
        done: Whether it is complete.
        is_async: Whether the program goes on without waiting.
        waited: Whether the program has waited for it.
        guarded: Copies of the tensors that an asynchronous call uses, to find changes before the wait.
    """

    operation: str
    rank: int
    index: int
    group: SharedGroup
    number: int
    key: tuple[Any, ...]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    line: SourceLine
    options: dict[str, Any] = field(default_factory=dict)
    peer: int | None = None
    done: bool = False
    is_async: bool = False
    waited: bool = False
    guarded: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_transfer(self) -> bool:
        """Whether this is a send or a receive."""
        return self.number < 0

    @property
    def payload(self) -> int:
        """The bytes that this rank passes to the operation: its inputs, or what it receives."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.inputs or self.outputs)

    def __str__(self) -> str:
        tensors = self.inputs or self.outputs
        shown = [shape_text(tensor) for tensor in tensors[:_SHOWN_TENSORS]]
        if len(tensors) > _SHOWN_TENSORS:
            shown.append(f"... {len(tensors)} tensors")
        details = [f"{name}={self.options[name]}" for name in ("op", "root", "tag", "sends", "receives", "what")
                   if self.options.get(name) is not None]  # fmt: skip
        text = f"{self.operation}({', '.join([*shown, *details])})"
        if self.is_transfer:
            other = "any rank" if self.peer is None else f"rank {self.peer}"
            return f"{text} {'to' if self.operation == 'send' else 'from'} {other} on {self.group}"
        return f"{text}, call {self.number} on {self.group}"
