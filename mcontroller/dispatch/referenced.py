"""ReferencedBatch: a batch of which some columns are here, and further ones stay on the workers that computed them.

A call that gets one sends the columns that are here, and the addresses of the others. Every rank fetches its own rows
of those, from the workers that have them: they go from group to group once, and never through the controller. Rows in
another order, or a selection of them, are an index next to the addresses. Only the index is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mcontroller.data.protocol import DataProto, concat_batches
from mcontroller.dispatch.future import DataProtoFuture, Future
from mcontroller.dispatch.remote_batch import JoinedBatch, RemoteBatch, without_loss
from mcontroller.errors import DataError
from mcontroller.partition import Partition
from mcontroller.transport import Deferred, Fetch, Handle

__all__ = ["ReferencedBatch", "ReferencedShard"]


@dataclass(frozen=True)
class Reference:
    """Columns that stay on the workers: row ``i`` of the batch is row ``index[i]`` of ``rows``.

    Attributes:
        names: the names of the columns.
        rows: their rows on the workers.
        index: int64 ``[rows]``.
        transport: name of the transport of the handles.
        fetch: reads the handles in the controller.
        total: number of rows of ``rows``.
    """

    names: tuple[str, ...]
    rows: RemoteBatch
    index: np.ndarray
    transport: str
    fetch: Fetch
    total: int

    def take(self, index: np.ndarray) -> Reference:
        """Return the rows at an index."""
        return replace(self, index=self.index[index])

    def read(self, names: Collection[str]) -> DataProto:
        """Return columns, here."""
        return self.rows.open(_only(self.fetch, names)).read(self.index)


@dataclass(frozen=True)
class ReferencedShard(Deferred):
    """The rows of one shard; the rank fetches the columns that are on workers.

    Attributes:
        here: the columns that the controller has, and the ``meta_info``.
        remote: remote batches, the rows of each, and the columns to read.
        loss_free: this many rows at the end do not count in a loss.
    """

    here: DataProto
    remote: tuple[tuple[RemoteBatch, np.ndarray, tuple[str, ...]], ...]
    loss_free: int = 0

    def handles(self) -> Sequence[Handle]:
        """Return the handles of the remote batches."""
        return [handle for rows, _, _ in self.remote for handle in rows.handles()]

    def private(self, copy: Callable[[Any], Any]) -> ReferencedShard:
        """Return the shard with a private copy of the columns of the controller."""
        return replace(self, here=copy(self.here))

    def resolve(self, fetch: Fetch) -> DataProto:
        """Fetch the rows, and return them with the columns of the controller."""
        batch = self.here
        for rows, index, names in self.remote:
            batch = batch.union(rows.open(_only(fetch, names, text=False)).read(index))
        rows_of = len(batch)
        return without_loss(batch, np.arange(rows_of - self.loss_free, rows_of)) if self.loss_free else batch


class ReferencedBatch:
    """A batch with columns here, and columns that stay on the workers.

    Every operation returns a new batch, and moves no column that is on the workers. Passed to a method of a group, it
    is the batch of all its columns; a method that gets its arguments whole, and groups of another transport, get it
    fetched.

    Args:
        columns: the columns here, the non-tensor columns and the ``meta_info``.
        references: the columns on the workers.
        copies: the names of columns here that are the same on the workers: they are not sent.
    """

    def __init__(
        self, columns: DataProto, references: Sequence[Reference] = (), copies: Collection[str] = frozenset()
    ) -> None:
        self.columns = columns
        self.references = tuple(references)
        self.copies = frozenset(copies)

    @staticmethod
    def of(result: Future[Any] | DataProto, read: Collection[str] | None = None) -> ReferencedBatch:
        """Return the result of a call whose tensor columns stay on the workers, apart from those that are read.

        Its non-tensor columns and its ``meta_info`` are here. A result that is not kept on the workers is here whole.

        Args:
            result: the future of a call; waits for it.
            read: names of columns to read here, as far as the result has them; None for all.

        Raises:
            GroupError: the call failed.
        """
        if not isinstance(result, DataProtoFuture) or not isinstance(result.rows, RemoteBatch):
            return ReferencedBatch(result.get() if isinstance(result, Future) else result)
        result.check()
        parts: list[DataProto] = []
        opened = result.rows.open(_only(result.fetch, read, seen=parts))
        index = np.arange(opened.total)
        here = opened.read(index)
        names = tuple(dict.fromkeys(name for part in parts for name in part.tensors()))
        metas = [DataProto(meta_info=part.meta_info) for part in parts]
        here.meta_info = concat_batches(metas, keep_first=True).meta_info
        reference = Reference(names, result.rows, index, result.transport, result.fetch, opened.total)
        return ReferencedBatch(here, [reference], frozenset(here.tensors()))

    @staticmethod
    def concat(batches: Sequence[ReferencedBatch]) -> ReferencedBatch:
        """Return the rows of batches with the same columns, one after another; see ``DataProto.concat``.

        If they have different columns here, such as one that was loaded from a file, all are fetched.
        """
        if len({frozenset(batch.columns.tensors()) for batch in batches}) > 1:
            return ReferencedBatch(DataProto.concat([batch.here() for batch in batches]))
        columns = DataProto.concat([batch.columns for batch in batches])
        references = [_joined(parts) for parts in zip(*(batch.references for batch in batches), strict=True)]
        return ReferencedBatch(columns, references, frozenset.intersection(*(batch.copies for batch in batches)))

    def __len__(self) -> int:
        return len(self.references[0].index) if self.references else len(self.columns)

    def has_columns(self) -> bool:
        """Return whether the batch has columns, and not only ``meta_info``."""
        return bool(self.references) or self.columns.has_columns()

    @property
    def transports(self) -> set[str]:
        """The names of the transports of its references."""
        return {reference.transport for reference in self.references}

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensor columns."""
        return frozenset(self.columns.tensors()).union(*(reference.names for reference in self.references))

    def union(self, other: DataProto | ReferencedBatch) -> ReferencedBatch:
        """Unite the columns of two batches of the same rows; see ``DataProto.union``.

        Raises:
            DataError: the numbers of rows differ, or a column of both has different values.
        """
        more = other if isinstance(other, ReferencedBatch) else ReferencedBatch(other)
        if len(self) != len(more) and self.has_columns() and more.has_columns():
            raise DataError(
                f"union of {len(self)} rows with {len(more)} rows: both batches must have the same number of rows",
                rows=(len(self), len(more)),
            )
        united = self.columns.union(more.columns)
        return ReferencedBatch(united, (*self.references, *more.references), self.copies | more.copies)

    def with_tensors(self, tensors: dict[str, torch.Tensor]) -> ReferencedBatch:
        """Return the batch with tensors added or replaced; see ``DataProto.with_tensors``."""
        kept = [
            replace(reference, names=tuple(name for name in reference.names if name not in tensors))
            for reference in self.references
        ]
        return ReferencedBatch(self.columns.with_tensors(tensors), kept, self.copies - tensors.keys())

    def with_here(self, columns: DataProto) -> ReferencedBatch:
        """Return the batch with other columns here; those that are on the workers too must not have changed."""
        return ReferencedBatch(columns, self.references, self.copies)

    def without(self, names: Collection[str]) -> ReferencedBatch:
        """Return the batch without tensor columns of these names; those that it does not have are no error."""
        dropped = set(names)
        kept = [
            replace(reference, names=tuple(name for name in reference.names if name not in dropped))
            for reference in self.references
        ]
        here = self.columns.select([name for name in self.columns.tensors() if name not in dropped])
        return ReferencedBatch(here, [reference for reference in kept if reference.names], self.copies - dropped)

    def without_text(self) -> ReferencedBatch:
        """Return the batch without its non-tensor columns."""
        return ReferencedBatch(self.columns.select(non_tensor_batch_keys=[]), self.references, self.copies)

    def select_idxs(self, index: torch.Tensor) -> ReferencedBatch:
        """Return the rows at an index, in its order."""
        rows = index.numpy()
        taken = [reference.take(rows) for reference in self.references]
        return ReferencedBatch(self.columns.select_idxs(index), taken, self.copies)

    def read(self, names: Collection[str]) -> ReferencedBatch:
        """Return the batch with columns read from the workers, so that they are here too."""
        missing = [name for name in names if name not in self.columns.tensors()]
        columns = self.columns
        for reference in self.references:
            wanted = [name for name in missing if name in reference.names]
            if wanted:
                columns = columns.union(_without_meta(reference.read(wanted)))
        return ReferencedBatch(columns, self.references, self.copies | set(missing))

    def here(self) -> DataProto:
        """Return the batch with all columns here."""
        return self.read(self.names).columns

    def split(self, partition: Partition) -> list[ReferencedShard]:
        """Return the shards of a partition of the rows."""
        tensors = self.columns.tensors()
        here = self.columns.select([name for name in tensors if name not in self.copies])
        return [self._shard(here, partition, shard) for shard in range(len(partition.shards))]

    def _shard(self, here: DataProto, partition: Partition, shard: int) -> ReferencedShard:
        rows = partition.rows(shard)
        taken = here
        if here.has_columns():
            taken = here.slice(rows.start, rows.stop) if isinstance(rows, range) else here.select_idxs(rows)
        index = np.asarray(rows, dtype=np.int64)
        sent = set(here.tensors())
        remote = tuple(
            (reference.rows, reference.index[index], tuple(name for name in reference.names if name not in sent))
            for reference in self.references
        )
        return ReferencedShard(taken, remote, partition.pads[shard] if partition.zero_loss else 0)


def _joined(references: Sequence[Reference]) -> Reference:
    first = references[0]
    if len(references) == 1:
        return first
    starts = np.cumsum([0, *(reference.total for reference in references)])
    index = np.concatenate([each.index + start for each, start in zip(references, starts[:-1], strict=True)])
    rows = JoinedBatch(tuple(reference.rows for reference in references))
    return replace(first, rows=rows, index=index, total=int(starts[-1]))


def _only(
    fetch: Fetch, names: Collection[str] | None, *, text: bool = True, seen: list[DataProto] | None = None
) -> Fetch:
    """Return a function that fetches handles and keeps, of batches, the tensor columns of these names.

    Args:
        fetch: fetches whole values.
        names: of the columns; None for all.
        text: whether to keep non-tensor columns.
        seen: a list to which the whole batches are added.
    """

    def fetched(handles: Sequence[Handle], timeout: float | None = None) -> list[Any]:
        return [kept(value) if isinstance(value, DataProto) else value for value in fetch(handles, timeout)]

    def kept(batch: DataProto) -> DataProto:
        if seen is not None:
            seen.append(batch)
        chosen = [name for name in batch.tensors() if names is None or name in names]
        return _without_meta(batch.select(chosen, None if text else []))

    return fetched


def _without_meta(batch: DataProto) -> DataProto:
    batch.meta_info = {}
    return batch
