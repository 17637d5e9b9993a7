"""The line of the program that made a call, outside torch and Megatron, and the texts of calls and groups."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

_SHOWN_MEMBERS = 8
_SHOWN_TENSORS = 4
_ROOT = Path(__file__).parents[1]
_ADAPTERS = tuple(str(_ROOT / name) + os.sep for name in ("hangs", "simulated", "cpu", "dry_run"))
_LIBRARY, _MEGATRON, _USER = range(3)
_MEGATRON_PACKAGE = re.compile(r"/megatron/(core|legacy|post_training|rl|training)/")

AXIS_OF_DESCRIPTION = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
}
"""Megatron's description of a group -> the axis on which its members differ."""

_Place = tuple[CodeType, int]
"""A code object, and the offset of the last instruction that it ran."""
_kinds: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Where a rank made a call.

    Attributes:
        line: ``file:number in function``, outside torch and Megatron; in Megatron if there is no other.
        through: the line of Megatron that called torch for it; None if the program called torch itself.
    """

    line: str
    through: str | None = None

    def __str__(self) -> str:
        return f"{self.line} (through {self.through})" if self.through else self.line


def calling_line() -> SourceLine:
    """Return the line that made the running call."""
    return source_line(*calling_position())


def calling_position(frame: FrameType | None = None) -> tuple[_Place | None, _Place | None]:
    """Return the place in the program that made the running call, and that in Megatron; see ``source_line``.

    The two are found at a lower cost than their text, so that they can be the key of a cache.

    Args:
        frame: the innermost frame of the call, by default the caller's.
    """
    frame = sys._getframe(1) if frame is None else frame
    inner: _Place | None = None
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code.co_filename)  # equal code of two files is one key
        if kind is None:
            kind = _kinds[code.co_filename] = _kind(code.co_filename)
        if kind == _USER:
            return (code, frame.f_lasti), inner
        if kind == _MEGATRON and inner is None:
            inner = code, frame.f_lasti
        frame = frame.f_back
    return None, inner


def raising_line(error: BaseException) -> SourceLine:
    """Return the line that raised an exception: the innermost outside torch and Megatron, and Megatron's below it."""
    program: _Place | None = None
    megatron: _Place | None = None
    entry = error.__traceback__
    while entry is not None:
        place = entry.tb_frame.f_code, entry.tb_lasti
        kind = _kind(place[0].co_filename)
        if kind == _USER:
            program, megatron = place, None
        elif kind == _MEGATRON:
            megatron = place
        entry = entry.tb_next
    return source_line(program, megatron)


def source_line(program: _Place | None, megatron: _Place | None) -> SourceLine:
    """Return the text of two places of ``calling_position``."""
    inner = None if megatron is None else _text(megatron[0].co_filename, *megatron)
    if program is None:
        return SourceLine(inner or "(unknown)")
    return SourceLine(_text(program[0].co_filename, *program), inner)


def _kind(filename: str) -> int:
    if _MEGATRON_PACKAGE.search(filename):
        return _MEGATRON
    inside = filename.startswith((*_ADAPTERS, os.path.dirname(os.__file__) + os.sep, "<frozen", "<string>"))
    installed = "/site-packages/" in filename and not filename.startswith(_ADAPTERS)
    library = "/torch/" in filename or filename.endswith("/typing_extensions.py")  # decorates functions of torch
    return _LIBRARY if (inside and not installed) or library else _USER


@functools.cache
def _text(filename: str, code: CodeType, offset: int) -> str:
    number = next((line for start, end, line in code.co_lines() if start <= offset < end), code.co_firstlineno)
    return f"{path_text(filename)}:{number} in {code.co_name}"


def path_text(filename: str) -> str:
    """Return the path of a file as reports have it: of Megatron, from its package on, installed or in a checkout."""
    if megatron := _MEGATRON_PACKAGE.search(filename):
        return filename[megatron.start() + 1 :]
    installed = filename.rpartition("/site-packages/")[2]
    relative = os.path.relpath(filename) if installed == filename else installed
    return installed if relative.startswith("..") else relative


def members_text(ranks: Sequence[int]) -> str:
    """Return the ranks of a group, shortened if there are many."""
    if len(ranks) <= _SHOWN_MEMBERS:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[:4]))}, ..., {ranks[-1]}] ({len(ranks)} ranks)"


def group_text(name: str, description: str, ranks: Sequence[int], axis: str = "") -> str:
    """Return a group by its description, or by torch's name if there is none, with its axes and its members.

    The axes are left out if the description is Megatron's name of just that axis.
    """
    shown = f" ({axis})" if axis and AXIS_OF_DESCRIPTION.get(description) != axis else ""
    return f"group {group_label(name, description)}{shown} {members_text(ranks)}"


def group_label(name: str, description: str) -> str:
    """Return the description of a group, or torch's name if there is none."""
    return description if description not in ("", "undefined") else f"{name!r}"


def call_text(
    operation: str, tensors: Sequence[str], details: Sequence[str], group: str, number: int, peer: int | None = None
) -> str:
    """Return a collective or a transfer as reports show it.

    Args:
        operation: the name in torch.distributed.
        tensors: dtype and shape of each tensor, such as ``float32[4, 8]``.
        details: further values, such as ``op=SUM``.
        group: the text of the group.
        number: the number of the call among the collectives of the group; -1 for a transfer.
        peer: of a transfer, the global rank of the other side; None for any.
    """
    shown = list(tensors[:_SHOWN_TENSORS])
    if len(tensors) > _SHOWN_TENSORS:
        shown.append(f"... {len(tensors)} tensors")
    text = f"{operation}({', '.join([*shown, *details])})"
    if number >= 0:
        return f"{text}, call {number} on {group}"
    other = "any rank" if peer is None else f"rank {peer}"
    return f"{text} {'to' if operation == 'send' else 'from'} {other} on {group}"
