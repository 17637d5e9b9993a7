"""Remote batches: batches whose rows are still on the workers. They fetch only the rows that are needed.

The result of a call is a list of parts, one per shard, each behind a handle. A ``ResultBatch`` is all parts joined, a
``Window`` one shard of a remote batch, a ``JoinedBatch`` several remote batches one after another. All of them are
small. They are sent instead of the batch, and the rank that gets one resolves it. Row counts have handles of their
own, so that a rank that needs a few rows can find them without fetching others.
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

__all__ = ["JoinedBatch", "Part", "RemoteBatch", "ResultBatch", "Split", "Window", "differing_rows", "take_shard"]

LOSS_MASKS = ("response_mask", "loss_mask")


class OpenBatch(NamedTuple):
    """A remote batch whose number of rows is known: ``read(index)`` returns the rows at an index, in its order."""

    total: int
    read: Callable[[np.ndarray], DataProto]


class RemoteBatch(Deferred):
    """A batch whose rows are fetched and joined on the rank that needs them."""

    @abstractmethod
    def open(self, fetch: Fetch) -> OpenBatch:
        """Fetch the row counts, and nothing else."""

    @abstractmethod
    def counts_only(self) -> RemoteBatch:
        """Return a batch that can only count its rows. It has no handles of parts, so it keeps no values alive."""

    def resolve(self, fetch: Fetch) -> DataProto:
        """Fetch all rows."""
        total, read = self.open(fetch)
        return read(np.arange(total))


@dataclass(frozen=True)
class Split:
    """A partition that depends on a row count that only the workers know."""

    rows: RemoteBatch
    shards: int
    padding: Padding | None

    def partition(self, fetch: Fetch) -> Partition:
        """Fetch the row counts and return the partition."""
        return split_rows(self.rows.open(fetch).total, self.shards, padding=self.padding)


@dataclass(frozen=True)
class Part(Deferred):
    """One part of a result, unchanged.

    Attributes:
        handle: handle of the part.
        length: handle of its row count.
        same_length: row counts (or their handles) of other arguments of the call, which must be equal to ``length``.
    """

    handle: Handle
    length: Handle
    same_length: tuple[tuple[str, Handle | int], ...] = ()

    def handles(self) -> Sequence[Handle]:
        """Return the handle of the part."""
        return [self.handle]

    def resolve(self, fetch: Fetch) -> Any:
        """Fetch the part.

        Raises:
            DispatchError: another argument has another number of rows.
        """
        if self.same_length:
            own = fetch([self.length])[0]
            for name, other in self.same_length:
                _check_same_length(own, name, other if isinstance(other, int) else fetch([other])[0])
        return fetch([self.handle])[0]


def differing_rows(received: Sequence[int], returned: Sequence[int], ranks: Sequence[int]) -> str | None:
    """Return which ranks returned another number of rows than they got, as an error text; None if all are equal.

    Args:
        received: the number of rows that each shard got, padding rows included.
        returned: the number of rows by shard.
        ranks: the rank that returned each shard.
    """
    differing = [
        f"rank {rank} got {rows} rows and returned {count}"
        for rank, rows, count in zip(ranks, received, returned, strict=True)
        if count != rows
    ]
    if not differing or not any(received):  # a batch of meta_info alone promises nothing
        return None
    more = f" and {len(differing) - 8} more" if len(differing) > 8 else ""
    return (
        f"{'; '.join(differing[:8])}{more}: return a row for each row, or declare that the method returns another "
        "number with @register(..., changes_rows=True)"
    )


def received_rows(origin: Partition | Split, received: ResultBatch | None, fetch: Fetch) -> Sequence[int]:
    """Return the number of rows that each shard of a call got.

    Args:
        origin: how its rows were split, if it got no parts of an earlier result.
        received: that result.
        fetch: fetches row counts.
    """
    if received is not None:
        return received.checked_lengths(fetch)
    return [len(rows) for rows in (origin.partition(fetch) if isinstance(origin, Split) else origin).shards]


@dataclass(frozen=True)
class ResultBatch(RemoteBatch):
    """The result of a call.

    Attributes:
        parts: handles of the parts, in shard order.
        lengths: handles of their row counts.
        origin: how the rows of the call's input were split; None for the caller's order without padding.
        source: the call, as error messages name it.
        same_rows: the ranks of the parts, if each must have as many rows as it got; None if they may differ.
        received: the earlier result, as ``as_received``, if its parts were the input of the call.
    """

    parts: tuple[Handle, ...]
    lengths: tuple[Handle, ...]
    origin: Partition | Split | None
    source: str
    same_rows: tuple[int, ...] | None = None
    received: ResultBatch | None = None

    def handles(self) -> Sequence[Handle]:
        """Return the handles of the parts and of row counts."""
        return [*self.parts, *self.lengths, *(self.received.handles() if self.received else ())]

    def counts_only(self) -> ResultBatch:
        """Return the same batch without the parts."""
        return replace(self, parts=())

    def as_received(self) -> ResultBatch:
        """Return the row counts of this result and of its input, for the call that gets its parts.

        Each result of a chain of calls is checked by the next call, which therefore needs no older ones.
        """
        received = None if self.received is None else replace(self.received, same_rows=None, received=None)
        return replace(self, parts=(), received=received)

    def checked_lengths(self, fetch: Fetch) -> Sequence[int]:
        """Fetch the row counts of the parts.

        Raises:
            DispatchError: a part is not a DataProto, or has another number of rows than its rank got.
        """
        lengths = fetch(self.lengths)
        if None in lengths:
            raise DispatchError(
                f"{self.source} returned no DataProto for shard {lengths.index(None)}, so its rows cannot be passed"
                " on: return a DataProto, or call get() and pass the result",
                source=self.source,
            )
        if self.origin is None or self.same_rows is None or not any(lengths):
            return lengths
        reason = differing_rows(received_rows(self.origin, self.received, fetch), lengths, self.same_rows)
        if reason is not None:
            raise DispatchError(f"{self.source}: {reason}", source=self.source, ranks=self.same_rows)
        return lengths

    def open(self, fetch: Fetch) -> OpenBatch:
        """Fetch the row counts.

        Raises:
            DispatchError: a part is not a DataProto, or has another number of rows than its rank got.
        """
        lengths = self.checked_lengths(fetch)
        origin = self.origin.partition(fetch) if isinstance(self.origin, Split) else self.origin
        keep, order = (tuple(lengths), None) if origin is None else origin.restore(lengths)
        offsets = np.concatenate([[0], np.cumsum(keep, dtype=np.int64)])

        def read(index: np.ndarray) -> DataProto:
            positions = index if order is None else np.asarray(order, dtype=np.int64)[index]
            return _gather(positions, offsets, read_parts)

        def read_parts(needed: Sequence[int], index: Sequence[np.ndarray]) -> list[DataProto]:
            return list(map(_at, fetch([self.parts[part] for part in needed]), index))

        return OpenBatch(int(offsets[-1]), read)


@dataclass(frozen=True)
class JoinedBatch(RemoteBatch):
    """The rows of several remote batches, one after another."""

    of: tuple[RemoteBatch, ...]

    def handles(self) -> Sequence[Handle]:
        """Return the handles of all of them."""
        return [handle for rows in self.of for handle in rows.handles()]

    def counts_only(self) -> JoinedBatch:
        """Return the same batch without the parts."""
        return JoinedBatch(tuple(rows.counts_only() for rows in self.of))

    def open(self, fetch: Fetch) -> OpenBatch:
        """Fetch the row counts."""
        opened = [rows.open(fetch) for rows in self.of]
        offsets = np.concatenate([[0], np.cumsum([rows.total for rows in opened], dtype=np.int64)])

        def read_of(needed: Sequence[int], index: Sequence[np.ndarray]) -> list[DataProto]:
            return [opened[number].read(rows) for number, rows in zip(needed, index, strict=True)]

        return OpenBatch(int(offsets[-1]), lambda index: _gather(index, offsets, read_of))


@dataclass(frozen=True)
class Window(RemoteBatch):
    """One shard of a remote batch.

    Attributes:
        of: the remote batch.
        shard: index of the shard.
        shards: number of shards.
        padding: how shards are padded to the same number of rows; see ``split_rows``.
        expected: the number of rows that ``of`` must have, or another remote batch that must have as many.
    """

    of: RemoteBatch
    shard: int
    shards: int
    padding: Padding | None = "none"
    expected: int | RemoteBatch | None = None

    def handles(self) -> Sequence[Handle]:
        """Return the handles of the whole batch, and of ``expected``."""
        return [*self.of.handles(), *(self.expected.handles() if isinstance(self.expected, RemoteBatch) else ())]

    def counts_only(self) -> Window:
        """Return the same batch without the parts."""
        return replace(self, of=self.of.counts_only())

    def open(self, fetch: Fetch) -> OpenBatch:
        """Fetch the row counts.

        Raises:
            DispatchError: ``of`` does not have the ``expected`` number of rows.
        """
        count, read = self.of.open(fetch)
        if self.expected is not None:
            expected = self.expected.open(fetch).total if isinstance(self.expected, RemoteBatch) else self.expected
            _check_same_length(count, "a batch", expected)
        partition = split_rows(count, self.shards, padding=self.padding)
        rows = np.asarray(partition.rows(self.shard), dtype=np.int64)
        pads = partition.pads[self.shard] if partition.zero_loss else 0

        def read_window(index: np.ndarray) -> DataProto:
            chosen = read(rows[index])
            return without_loss(chosen, np.flatnonzero(index >= len(rows) - pads)) if pads else chosen

        return OpenBatch(len(rows), read_window)


def take_shard(batch: DataProto, partition: Partition, shard: int) -> DataProto:
    """Return the rows of one shard, as views of the batch if they are consecutive, with a copy of ``meta_info``."""
    rows = partition.rows(shard)
    taken = batch.slice(rows.start, rows.stop) if isinstance(rows, range) else batch.select_idxs(rows)
    pads = partition.pads[shard]
    return without_loss(taken, np.arange(len(rows) - pads, len(rows))) if partition.zero_loss and pads else taken


def without_loss(batch: DataProto, rows: np.ndarray) -> DataProto:
    """Return the batch with loss masks, in new memory, that are 0 in these rows.

    Raises:
        DispatchError: the batch has no loss mask.
    """
    tensors = batch.tensors()
    masks = {key: tensors[key].clone() for key in LOSS_MASKS if key in tensors}
    if not masks:
        raise DispatchError(
            f"padding='zero_loss' sets {' or '.join(LOSS_MASKS)} to 0 in padding rows, and the batch has neither: add "
            "one, or pad with 'repeat'",
            columns=tuple(tensors),
        )
    for mask in masks.values():
        mask[torch.from_numpy(rows)] = 0
    return batch.with_tensors(masks)


def _gather(
    positions: np.ndarray,
    offsets: np.ndarray,
    read: Callable[[Sequence[int], Sequence[np.ndarray]], list[DataProto]],
) -> DataProto:
    """Return the rows at ``positions`` of parts that begin at ``offsets``; read only the parts that contain one.

    Without positions, the first part is read for its ``meta_info``; if no part has a row, all are read.
    """
    part_of = np.searchsorted(offsets[1:], positions, side="right")
    needed = np.unique(part_of).tolist() or list(range(1 if offsets[-1] else len(offsets) - 1))
    joined = DataProto.concat(read(needed, [positions[part_of == part] - offsets[part] for part in needed]))
    if bool((np.diff(part_of) >= 0).all()):
        return joined
    order = np.empty(len(positions), dtype=np.int64)
    order[np.argsort(part_of, kind="stable")] = np.arange(len(positions))
    return joined.select_idxs(order)


def _at(piece: DataProto, index: np.ndarray) -> DataProto:
    """Return the rows at an index, as views if they are consecutive."""
    first = int(index[0]) if len(index) else 0
    if np.array_equal(index, np.arange(first, first + len(index))):
        return piece.slice(first, first + len(index))
    return piece.select_idxs(index)


def _check_same_length(own: int | None, name: str, other: int | None) -> None:
    if own != other:
        raise DispatchError(
            f"a future has {own} rows and {name} has {other}: all batches of a call must have the same number of rows",
            rows=own,
            other=other,
        )
