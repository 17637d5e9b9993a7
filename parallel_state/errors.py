"""Errors of the parallel_state package.

Every error carries its facts as attributes beside the message, and keeps both through pickling.
"""

from __future__ import annotations

from typing import Any


class ParallelStateError(Exception):
    """An error with a message for people and fields for programs.

    Every keyword becomes an attribute: ``LayoutError("...", world_size=12, tp=4).world_size == 12``.
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)


def _rebuild(cls: type[ParallelStateError], message: str, fields: dict[str, Any]) -> ParallelStateError:
    return cls(message, **fields)


class LayoutError(ParallelStateError, ValueError):
    """Declared sizes or order of the axes that do not fit together."""


class TopologyError(ParallelStateError, ValueError):
    """Collected coordinates that do not form the declared grid, or an axis that the topology does not have."""
