"""Rows that are still on the workers: descriptions of a batch that fetch no more of it than is asked for.

A call's result is parts, one per shard, each behind a handle. ``ResultBatch`` are these parts put together, ``Window``
is one shard of such rows, ``JoinedBatch`` several of them one after another. All are small, travel in place of the
batch, and become it where they are resolved. Row counts travel as handles of their own, so that a rank that needs a
few rows learns where they are without fetching what it does not need.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from mcontroller.data.protocol import DataProto
from mcontroller.errors import DispatchError
from mcontroller.partition import Padding, Partition, split_rows
from mcontroller.transport import Deferred, Fetch, Handle

__all__ = ["JoinedBatch", "Part", "RemoteBatch", "ResultBatch", "Split", "Window", "take_shard"]

LOSS_MASKS = ("response_mask", "loss_mask")


class OpenBatch(NamedTuple):
    """Rows whose number is known: ``read(index)`` gives those at the index, in its order."""

    total: int
    read: Callable[[np.ndarray], DataProto]


class RemoteBatch(Deferred):
    """A batch that is put together where it is needed."""

    @abstractmethod
    def open(self, fetch: Fetch) -> OpenBatch:
        """Fetches the row counts, and nothing else."""

    @abstractmethod
    def counts_only(self) -> RemoteBatch:
        """The same rows without their handles: enough to count them, and nothing is kept alive for it."""

    def resolve(self, fetch: Fetch) -> DataProto:
        total, read = self.open(fetch)
        return read(np.arange(total))


@dataclass(frozen=True)
class Split:
    """A partition that depends on a row count known only to the workers."""

    rows: RemoteBatch
    shards: int
    padding: Padding | None

    def partition(self, fetch: Fetch) -> Partition:
        return split_rows(self.rows.open(fetch).total, self.shards, padding=self.padding)


@dataclass(frozen=True)
class Part(Deferred):
    """One part as it is. ``alike`` are the row counts, by argument, that must equal this part's own (``length``)."""

    handle: Handle
    length: Handle
    alike: tuple[tuple[str, Handle | int], ...] = ()

    def handles(self) -> Sequence[Handle]:
        return [self.handle]

    def resolve(self, fetch: Fetch) -> Any:
        if self.alike:
            own = fetch([self.length])[0]
            for name, other in self.alike:
                _check_alike(own, name, other if isinstance(other, int) else fetch([other])[0])
        return fetch([self.handle])[0]


@dataclass(frozen=True)
class ResultBatch(RemoteBatch):
    """The result of a call, from its parts in shard order; ``origin`` says how the rows of its input were split.

    An ``origin`` of None is the caller's own order without padding: the parts need only be put one after another.
    """

    parts: tuple[Handle, ...]
    lengths: tuple[Handle, ...]
    origin: Partition | Split | None
    source: str

    def handles(self) -> Sequence[Handle]:
        return [*self.parts, *self.lengths]

    def counts_only(self) -> ResultBatch:
        return replace(self, parts=())

    def open(self, fetch: Fetch) -> OpenBatch:
        lengths = fetch(self.lengths)
        if None in lengths:
            raise DispatchError(
                f"{self.source} did not give a DataProto on shard {lengths.index(None)}, so its rows cannot be passed "
                "on: wait for its result, or return a DataProto",
                source=self.source,
            )
        origin = self.origin.partition(fetch) if isinstance(self.origin, Split) else self.origin
        keep, order = (tuple(lengths), None) if origin is None else origin.restore(lengths)
        offsets = np.concatenate([[0], np.cumsum(keep, dtype=np.int64)])

        def read(index: np.ndarray) -> DataProto:
            places = index if order is None else np.asarray(order, dtype=np.int64)[index]
            return _gather(places, offsets, read_parts)

        def read_parts(needed: Sequence[int], index: Sequence[np.ndarray]) -> list[DataProto]:
            return list(map(_at, fetch([self.parts[part] for part in needed]), index))

        return OpenBatch(int(offsets[-1]), read)


@dataclass(frozen=True)
class JoinedBatch(RemoteBatch):
    """The rows of several, one after another."""

    of: tuple[RemoteBatch, ...]

    def handles(self) -> Sequence[Handle]:
        return [handle for rows in self.of for handle in rows.handles()]

    def counts_only(self) -> JoinedBatch:
        return JoinedBatch(tuple(rows.counts_only() for rows in self.of))

    def open(self, fetch: Fetch) -> OpenBatch:
        opened = [rows.open(fetch) for rows in self.of]
        offsets = np.concatenate([[0], np.cumsum([rows.total for rows in opened], dtype=np.int64)])

        def read_of(needed: Sequence[int], index: Sequence[np.ndarray]) -> list[DataProto]:
            return [opened[number].read(rows) for number, rows in zip(needed, index, strict=True)]

        return OpenBatch(int(offsets[-1]), lambda index: _gather(index, offsets, read_of))


@dataclass(frozen=True)
class Window(RemoteBatch):
    """Shard ``shard`` of ``shards`` of some rows, of which there must be as many as ``expected`` says, or has."""

    of: RemoteBatch
    shard: int
    shards: int
    padding: Padding | None = "none"
    expected: int | RemoteBatch | None = None

    def handles(self) -> Sequence[Handle]:
        return [*self.of.handles(), *(self.expected.handles() if isinstance(self.expected, RemoteBatch) else ())]

    def counts_only(self) -> Window:
        return replace(self, of=self.of.counts_only())

    def open(self, fetch: Fetch) -> OpenBatch:
        count, read = self.of.open(fetch)
        if self.expected is not None:
            expected = self.expected.open(fetch).total if isinstance(self.expected, RemoteBatch) else self.expected
            _check_alike(count, "a batch", expected)
        partition = split_rows(count, self.shards, padding=self.padding)
        rows = np.asarray(partition.rows(self.shard), dtype=np.int64)
        pads = partition.pads[self.shard] if partition.zero_loss else 0

        def read_window(index: np.ndarray) -> DataProto:
            chosen = read(rows[index])
            return without_loss(chosen, np.flatnonzero(index >= len(rows) - pads)) if pads else chosen

        return OpenBatch(len(rows), read_window)


def take_shard(batch: DataProto, partition: Partition, shard: int) -> DataProto:
    """The rows of one shard: views of the batch where they are consecutive, with a ``meta_info`` of their own."""
    rows = partition.rows(shard)
    taken = batch.slice(rows.start, rows.stop) if isinstance(rows, range) else batch.select_idxs(rows)
    pads = partition.pads[shard]
    return without_loss(taken, np.arange(len(rows) - pads, len(rows))) if partition.zero_loss and pads else taken


def without_loss(batch: DataProto, rows: np.ndarray) -> DataProto:
    """The batch with the loss masks of these rows at 0, in memory of their own; DispatchError where it has no mask."""
    held = batch.tensors()
    masks = {key: held[key].clone() for key in LOSS_MASKS if key in held}
    if not masks:
        raise DispatchError(
            f"padding='zero_loss' sets {' or '.join(LOSS_MASKS)} to 0 in padding rows, and the batch has neither: add "
            "one, or pad with 'repeat'",
            columns=tuple(held),
        )
    for mask in masks.values():
        mask[torch.from_numpy(rows)] = 0
    return batch.with_tensors(masks)


def _gather(
    places: np.ndarray,
    offsets: np.ndarray,
    read: Callable[[Sequence[int], Sequence[np.ndarray]], list[DataProto]],
) -> DataProto:
    """The rows at ``places`` of parts that begin at ``offsets``; only parts that hold one of them are read.

    Where no part has a row all are read, for what their ``meta_info`` says.
    """
    part_of = np.searchsorted(offsets[1:], places, side="right")
    needed = np.unique(part_of).tolist() or list(range(1 if offsets[-1] else len(offsets) - 1))
    joined = DataProto.concat(read(needed, [places[part_of == part] - offsets[part] for part in needed]))
    if bool((np.diff(part_of) >= 0).all()):
        return joined
    order = np.empty(len(places), dtype=np.int64)
    order[np.argsort(part_of, kind="stable")] = np.arange(len(places))
    return joined.select_idxs(order)


def _at(piece: DataProto, index: np.ndarray) -> DataProto:
    """The rows at an index, as views where they are consecutive."""
    first = int(index[0]) if len(index) else 0
    if np.array_equal(index, np.arange(first, first + len(index))):
        return piece.slice(first, first + len(index))
    return piece.select_idxs(index)


def _check_alike(own: int | None, name: str, other: int | None) -> None:
    if own != other:
        raise DispatchError(
            f"a future of {own} rows stands beside {name} of {other}: all batches of a call must have the same rows",
            rows=own,
            other=other,
        )
