"""The line of a program that made a call: the innermost frame outside torch, and the one outside Megatron too."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SourceLine", "calling_line"]

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
    return _LIBRARY if (inside and not installed) or "/torch/" in filename else _USER


@functools.cache
def _text(filename: str, number: int, function: str) -> str:
    installed = filename.rpartition("/site-packages/")[2]
    if installed == filename:
        relative = os.path.relpath(filename)
        installed = filename if relative.startswith("..") else relative
    return f"{installed}:{number} in {function}"
