"""Tensor columns that are kept on the workers that computed them, and which rows of them a batch has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mcontroller.data.columns import Columns, columns_like, make_columns
from mcontroller.data.rows import join_rows, slice_rows, take_rows
from mcontroller.transport import Fetch, Handle

if TYPE_CHECKING:
    from mcontroller.data.columns import Batch


@dataclass(frozen=True, eq=False)
class RemoteColumns:
    """Columns of the batches that several ranks returned: row ``i`` is row ``index[i]`` of these, one after another.

    Attributes:
        names: name of each column in the batches that the ranks returned, by its name here.
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
        """Return the columns of these names, as far as they are local: one entry, or none."""
        kept = {name: self.names[name] for name in names if name in self.names}
        return [replace(self, names=kept)] if kept else []

    def sent(self) -> RemoteColumns:
        """Return the columns in the form that is sent: with the handles of those parts alone that have the rows."""
        needed, part_of = self._needed(self.index)
        starts = np.cumsum([0, *np.diff(self.starts)[needed]], dtype=np.int64)
        index = self.index - self.starts[part_of] + starts[np.searchsorted(needed, part_of)]
        return RemoteColumns(self.names, tuple(self.parts[part] for part in needed), starts, index)

    def read(self, names: Collection[str], timeout: float | None = None) -> dict[str, Any]:
        """Fetch columns and return the rows that the batch has, by name."""
        assert self.fetch is not None
        needed, part_of = self._needed(self.index)
        parts = self.fetch([self.parts[part] for part in needed], timeout)
        pieces = []
        for number, part in zip(needed, parts, strict=True):
            tensors = part.tensors()
            columns = columns_like(part.stored_batch, {name: tensors[self.names[name]] for name in names}, len(part))
            pieces.append(_rows(columns, self.index[part_of == number] - self.starts[number]))
        joined = pieces[0] if len(pieces) == 1 else join_rows(pieces)
        if (np.diff(part_of) < 0).any():
            order = np.empty(len(part_of), dtype=np.int64)
            order[np.argsort(part_of, kind="stable")] = np.arange(len(part_of))
            joined = take_rows(joined, torch.from_numpy(order))
        return dict(joined.items())

    def renamed(self, names: Mapping[str, str]) -> RemoteColumns:
        """Return the columns with new names, by the old ones."""
        return replace(self, names={names.get(name, name): source for name, source in self.names.items()})

    def has_rows_of(self, other: RemoteColumns) -> bool:
        """Return whether both are the same rows of the same results."""
        return self.parts == other.parts and np.array_equal(self.index, other.index)

    def _needed(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the parts that have these rows (one part if there are none), and the part of each row."""
        part_of = np.searchsorted(self.starts[1:], rows, side="right")
        return (np.unique(part_of) if len(rows) else np.zeros(1, dtype=np.int64)), part_of

    @staticmethod
    def joined(batches: Sequence[RemoteColumns]) -> RemoteColumns:
        """Return the rows of columns of the same names, one after another."""
        before = np.cumsum([0, *(each.starts[-1] for each in batches[:-1])])
        pairs = list(zip(batches, before, strict=True))
        starts = np.concatenate([[0], *(each.starts[1:] + rows for each, rows in pairs)])
        index = np.concatenate([each.index + rows for each, rows in pairs])
        parts = tuple(part for each in batches for part in each.parts)
        return replace(batches[0], parts=parts, starts=starts, index=index)


def joinable(data: Sequence[Any]) -> tuple[list[Batch | None], list[RemoteColumns]]:
    """Return the local tensors of each of several batches to join, and the tensors that stay on the workers, joined.

    All are fetched if the batches differ in the tensors that they have on workers.
    """
    places = {tuple((tuple(each.names.items()), each.transport) for each in part.remote) for part in data}
    own = {frozenset(part.tensor_names) - part.remote_names for part in data}
    if places == {()} or len(places) > 1 or len(own) > 1:
        return [part.prefetch().stored_batch for part in data], []
    here = [part.tensors_here() for part in data]
    names = [name for name in here[0] if all(name in tensors for tensors in here)]
    kept = [{name: tensors[name] for name in names} for tensors in here]
    stored: list[Batch | None] = [make_columns(each, (len(part),)) for each, part in zip(kept, data, strict=True)]
    return stored, [RemoteColumns.joined(each) for each in zip(*(part.remote for part in data), strict=True)]


def _rows(columns: Columns, index: np.ndarray) -> Columns:
    """Return the rows at an index, as views if they are consecutive."""
    first = int(index[0]) if len(index) else 0
    if np.array_equal(index, np.arange(first, first + len(index))):
        return slice_rows(columns, first, first + len(index))
    return take_rows(columns, torch.from_numpy(index))
