"""The root of the project's errors, and the errors of rank arithmetic.

Every error carries its facts as attributes beside the message, and keeps both through pickling.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LayoutError", "MControllerError", "MissingPackageError", "ParallelStateError", "TopologyError"]


class MControllerError(Exception):
    """Root of every error of this project: a message for people, and fields for programs.

    Every keyword becomes an attribute: ``LayoutError("...", world_size=12, tp=4).world_size == 12``. Message and
    fields survive pickling.
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)


def _rebuild(cls: type[MControllerError], message: str, fields: dict[str, Any]) -> MControllerError:
    return cls(message, **fields)


class MissingPackageError(MControllerError, ModuleNotFoundError):
    """A package that is needed and not installed; fields: ``name`` (the module), ``extra`` (what installs it)."""

    extra: str


class ParallelStateError(MControllerError):
    """Root of the errors of rank arithmetic and of Megatron's global state."""


class LayoutError(ParallelStateError, ValueError):
    """Declared sizes or order of the axes that do not fit together."""


class TopologyError(ParallelStateError, ValueError):
    """Collected coordinates that do not form the declared grid, or an axis that the topology does not have."""
