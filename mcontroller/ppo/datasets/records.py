"""Records: rows by column name, each with the location that error messages report; readers of them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcontroller.config.registry import Registry
from mcontroller.errors import DataError
from mcontroller.ppo.datasets.config import DatasetConfig

__all__ = ["DATASET_SOURCES", "Records", "checked_record"]


@dataclass(frozen=True)
class Records:
    """Rows of a data set.

    Attributes:
        name: the file, directory or task, for error messages.
        rows: the values by column.
        locations: the position of each row in ``name``, such as ``line 3``.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    locations: Sequence[str]

    def __len__(self) -> int:
        return len(self.rows)

    def location(self, index: int) -> str:
        """Return the name and the position of a row."""
        return f"{self.name}, {self.locations[index]}"

    def selected(self, skip: int, size: int) -> Records:
        """Return ``size`` rows after the first ``skip``; all of them for a ``size`` of 0.

        Raises:
            DataError: there are fewer.
        """
        end = skip + size if size else len(self)
        if end > len(self) or skip >= len(self):
            raise DataError(
                f"{self.name} has {len(self)} rows; skip {skip} and size {size} need {max(end, skip + 1)}",
                rows=len(self),
            )
        return Records(self.name, self.rows[skip:end], self.locations[skip:end])


DATASET_SOURCES: Registry[Callable[[DatasetConfig], Records]] = Registry("source of problems", key="source")
"""Readers of data sets by the name that a configuration uses. ``skip`` and ``size`` are applied to their result,
except by a reader that makes as many problems as needed."""


def checked_record(value: Any, location: str) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping with column names.

    Raises:
        DataError: it is another object, such as a plain string.
    """
    if not isinstance(value, Mapping):
        shown = repr(value)[:60]
        raise DataError(
            f"{location} is {shown} of type {type(value).__name__}; expected named columns, such as "
            '{"prompt": "1 + 1 =", "answer": "2"}',
            location=location,
        )
    return value
