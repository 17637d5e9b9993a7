"""Tensor columns that are kept on the workers that computed them, and which rows of them a batch has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mcontroller.transport import Fetch, Handle


@dataclass(frozen=True, eq=False)
class RemoteColumns:
    """Columns of the batches that several ranks returned: row ``i`` is row ``index[i]`` of these, one after another.

    Attributes:
        names: name of each column in the batches that the ranks returned, by its name in this batch.
        parts: handles of these batches.
        starts: number of rows before each of them, and of all, int64 ``[parts + 1]``.
        index: int64 ``[rows]``.
        transport: name of the transport of the handles.
        fetch: fetches handles in this process.
    """

    names: Mapping[str, str]
    parts: tuple[Handle, ...]
    starts: np.ndarray
    index: np.ndarray
    transport: str = ""
    fetch: Fetch | None = None

    def take(self, index: np.ndarray) -> RemoteColumns:
        """Return the rows at an index."""
        return replace(self, index=self.index[index])

    def only(self, names: Iterable[str]) -> list[RemoteColumns]:
        """Return those of the named columns that are among these: one entry, or none."""
        kept = {name: self.names[name] for name in names if name in self.names}
        return [replace(self, names=kept)] if kept else []

    def renamed(self, names: Mapping[str, str]) -> RemoteColumns:
        """Return the columns with new names, by the old ones."""
        return replace(self, names={names.get(name, name): source for name, source in self.names.items()})

    def has_rows_of(self, other: RemoteColumns) -> bool:
        """Return whether both are the same rows of the same results."""
        return self.parts == other.parts and np.array_equal(self.index, other.index)

    def sent(self) -> RemoteColumns:
        """Return the columns in the form that is sent: with the handles of those parts alone that have the rows."""
        needed, part_of = self._needed()
        starts = np.cumsum([0, *np.diff(self.starts)[needed]], dtype=np.int64)
        index = self.index - self.starts[part_of] + starts[np.searchsorted(needed, part_of)]
        return RemoteColumns(self.names, tuple(self.parts[part] for part in needed), starts, index)

    def read(self, names: Collection[str], timeout: float | None = None) -> dict[str, Any]:
        """Fetch columns and return the rows that the batch has, by name."""
        assert self.fetch is not None
        needed, part_of = self._needed()
        batches = self.fetch([self.parts[part] for part in needed], timeout)
        pieces = []
        for part, batch in zip(needed, batches, strict=True):
            columns = batch.select([self.names[name] for name in names], [], [])
            rows = self.index[part_of == part] - self.starts[part]
            first = int(rows[0]) if len(rows) else 0
            is_run = np.array_equal(rows, np.arange(first, first + len(rows)))
            pieces.append(columns.slice(first, first + len(rows)) if is_run else columns.select_idxs(rows))
        joined = pieces[0] if len(pieces) == 1 else pieces[0].concat(pieces)
        if (np.diff(part_of) < 0).any():
            joined = joined.select_idxs(np.argsort(np.argsort(part_of, kind="stable")))
        tensors = joined.tensors()
        return {name: tensors[self.names[name]] for name in names}

    def _needed(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the parts that have the rows (one part if there are no rows), and the part of each row."""
        part_of = np.searchsorted(self.starts[1:], self.index, side="right")
        return (np.unique(part_of) if len(part_of) else np.zeros(1, dtype=np.int64)), part_of

    @staticmethod
    def joined(batches: Sequence[RemoteColumns]) -> RemoteColumns:
        """Return the rows of columns of the same names, one after another."""
        before = np.cumsum([0, *(columns.starts[-1] for columns in batches[:-1])])
        pairs = list(zip(batches, before, strict=True))
        starts = np.concatenate([[0], *(columns.starts[1:] + rows for columns, rows in pairs)])
        index = np.concatenate([columns.index + rows for columns, rows in pairs])
        parts = tuple(part for columns in batches for part in columns.parts)
        return replace(batches[0], parts=parts, starts=starts, index=index)
