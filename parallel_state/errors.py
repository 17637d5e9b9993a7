"""The root of all errors of this project, and the errors of ranks, layouts and topologies."""

from __future__ import annotations

import functools
from typing import Any


class MControllerError(Exception):
    """Root of all errors of this project: a message for people, and fields for programs.

    Every keyword becomes an attribute: ``LayoutError("...", world_size=12, tp=4).world_size == 12``. The message and
    the fields survive pickling.

    Args:
        message: the text that ``str(error)`` returns.
        fields: the facts behind the message, by name.

    Attributes:
        message: as passed.
        fields: as passed; each is an attribute as well.
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), **self.fields), (self.message,)


class MissingPackageError(MControllerError, ModuleNotFoundError):
    """A package that is needed and not installed; fields: ``name`` (the module), ``extra`` (what installs it)."""

    extra: str


class BrokenPackageError(MControllerError, ImportError):
    """A package that is installed and cannot be imported; field: ``name`` (the module)."""


class ParallelStateError(MControllerError):
    """Root of the errors of ranks, layouts and topologies, and of Megatron's global state."""


class LayoutError(ParallelStateError, ValueError):
    """Declared axis sizes, or an axis order, that no layout can have."""


class TopologyError(ParallelStateError, ValueError):
    """Reported coordinates that do not form a full grid, or a query for an axis, index or rank that does not exist."""
