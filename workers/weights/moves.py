"""Plan which rank sends which slices to which rank, so that every rank gets the parts of tensors that it needs.

Pure: the same on every rank, without tensors or processes. ``workers.weights.whole_tensors`` puts whole tensors
together in the ranks of one group, and ``workers.weights.transfer`` sends parts from one group to another.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, zip_longest
from math import inf, prod
from typing import NamedTuple

from mcontroller.errors import DataError
from workers.weights.same_tensors import check_same_tensors

_ALIGNMENT = 64  # [bytes] of a tensor in a bucket
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
TensorInBucket = tuple[str, str, tuple[int, ...], int]
"""Name, name of the dtype, shape, and first byte in the bucket: plain values, which processes of engines unpickle."""


class Span(NamedTuple):
    """Consecutive indices of the dim that a tensor is divided along.

    Attributes:
        start, stop: in the tensor of the whole model, ``stop`` excluded.
        offset: the index of ``start`` in the rank's own tensor.
    """

    start: int
    stop: int
    offset: int


class TensorPart(NamedTuple):
    """The part of one tensor of the whole model that one rank has.

    Attributes:
        name, shape: of the tensor in the whole model, without padding.
        dtype, itemsize: the name of its dtype, and the bytes of an element.
        dim: the dim that it is divided along; None if the rank has all of it.
        spans: the parts of that dim that the rank has; padding is in none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    dim: int | None = None
    spans: tuple[Span, ...] = ()

    def along(self, dim: int) -> tuple[Span, ...]:
        """Return the parts of ``dim`` that the rank has; ``dim`` is its own, or the dim of ranks that have less."""
        return (Span(0, self.shape[dim], 0),) if self.dim is None else self.spans


class Move(NamedTuple):
    """A copy of ``length`` indices along ``dim`` from one rank's tensor to another's.

    Attributes:
        dtype, nbytes: of the source.
        dim, length: the dim that is copied along, and how many indices of it.
        source_rank, target_rank: the ranks.
        source_slot, target_slot: the position of the tensor in the rank's list of tensors.
        source_start, target_start: the first index in the rank's own tensor.
    """

    dtype: str
    dim: int
    length: int
    nbytes: int
    source_rank: int
    source_slot: int
    source_start: int
    target_rank: int
    target_slot: int
    target_start: int


def spans_of(length: int, pieces: int, size: int, index: int, limit: int) -> tuple[Span, ...]:
    """Return the indices of the whole that one rank has.

    Args:
        length: how many indices the rank's own tensor has.
        pieces: number of tensors stacked along the dim, each divided equally.
        size: number of ranks that the dim is divided over.
        index: the rank among them.
        limit: indices of the whole from this one on are padding and are left out.
    """
    share = length // pieces
    starts = [piece * share * size + index * share for piece in range(pieces)]
    spans = [Span(start, min(start + share, limit), piece * share) for piece, start in enumerate(starts)]
    return tuple(span for span in spans if span.stop > span.start)


def plan_moves(
    sources: Sequence[Sequence[TensorPart]],
    targets: Sequence[Sequence[TensorPart]],
    distance: Callable[[int, int], int] = lambda source, target: 0,
) -> list[list[Move]]:
    """Return the moves that fill every target from the sources, by target rank.

    A part that a rank has already is moved within the rank. If several ranks have a part, one of the nearest sends it;
    of these the one that has sent the least so far.

    Args:
        sources: by rank, its tensors in the layout that weights come from; a slot is an index into that list.
        targets: by rank, its tensors in the layout that weights go to.
        distance: from one rank to another.

    Raises:
        DataError: the two are not the same model, or no source has a part of a tensor; with the names.
    """
    have, need = ({tensor.name: tensor.shape for tensor in chain(*model)} for model in (sources, targets))
    check_same_tensors(have, need, "source and target are not the same model")
    dims = _dims(chain(*sources, *targets))
    parts = _held_ranges(sources, dims)
    sent = [0] * len(sources)
    moves: list[list[Move]] = [[] for _ in targets]
    for rank, local in enumerate(targets):
        for slot, target in enumerate(local):
            for span in target.along(dims[target.name]):
                for move in _into(rank, slot, span, target.name, parts[target.name], sent, distance):
                    moves[rank].append(move)
                    sent[move.source_rank] += move.nbytes if move.source_rank != rank else 0
    return moves


def whole_tensors(sources: Sequence[Sequence[TensorPart]]) -> list[TensorPart]:
    """Return every tensor that any rank has a part of, whole, layer after layer.

    Args:
        sources: by rank, its tensors in the order of its model.
    """
    by_name: dict[str, tuple[float, TensorPart]] = {}
    for local in sources:
        layer = -1.0  # before the layers
        for tensor in local:
            if numbered := _LAYER.search(tensor.name):
                layer = float(numbered[1])
            elif layer >= 0:
                layer = inf  # after them
            by_name.setdefault(tensor.name, (layer, tensor._replace(dim=None, spans=())))
    return [tensor for _, tensor in sorted(by_name.values(), key=lambda pair: pair[0])]


def plan_buckets(
    sources: Sequence[Sequence[TensorPart]],
    targets: Sequence[Sequence[TensorPart]],
    limit: int,
    distance: Callable[[int, int], int] = lambda source, target: 0,
    *,
    whole: bool = False,
) -> tuple[tuple[Move, ...], ...]:
    """Return the moves of ``plan_moves`` in buckets of one dtype, tensor after tensor.

    In a bucket no rank sends or receives more bytes than the limit, unless the bucket has one tensor, or one index of a
    tensor, that is larger. Of a tensor, a rank receives first from the rank after it, and last from the rank before it,
    so that all ranks send and receive at the same time.

    Args:
        sources: by rank, its tensors.
        targets: by rank, the tensors that it gets.
        limit: [bytes] see above.
        distance: from one rank to another.
        whole: every tensor is complete in one bucket; else it is sliced.

    Raises:
        DataError: see ``plan_moves``.
    """
    order = {tensor.name: number for number, tensor in enumerate(whole_tensors(sources))}

    def tensor_of(move: Move) -> tuple[str, int]:
        return move.dtype, order[targets[move.target_rank][move.target_slot].name]

    moves = list(chain(*plan_moves(sources, targets, distance)))
    moves.sort(key=lambda move: (*tensor_of(move), (move.source_rank - move.target_rank) % len(targets)))
    parts = [list(tensor) for _, tensor in groupby(moves, key=tensor_of)]
    if not whole:
        parts = [[move] for tensor in parts for move in _sliced(tensor, limit)]
    buckets: list[list[Move]] = []
    filled = Counter[tuple[str, int]]()
    for part in parts:
        added = Counter[tuple[str, int]]()
        for move in part:
            added["from", move.source_rank] += move.nbytes
            added["to", move.target_rank] += move.nbytes
        is_full = any(filled[key] + more > limit for key, more in added.items())
        if not buckets or is_full or buckets[-1][0].dtype != part[0].dtype:
            buckets.append([])
            filled = Counter()
        buckets[-1] += part
        filled += added
    return tuple(map(tuple, buckets))


def _sliced(moves: Sequence[Move], limit: int) -> Iterator[Move]:
    """Slice moves into pieces of at most the limit: first the first piece of every move, then the second of every."""
    pieces = [list(_pieces(move, limit)) for move in moves]
    return (piece for round_of_pieces in zip_longest(*pieces) for piece in round_of_pieces if piece is not None)


def _pieces(move: Move, limit: int) -> Iterator[Move]:
    per_index = move.nbytes // move.length
    longest = max(limit // per_index, 1)
    for start in range(0, move.length, longest):
        length = min(longest, move.length - start)
        yield move._replace(
            length=length,
            nbytes=length * per_index,
            source_start=move.source_start + start,
            target_start=move.target_start + start,
        )


def places_in_bucket(tensors: Iterable[TensorPart]) -> tuple[list[TensorInBucket], int]:
    """Return the places of whole tensors in a bucket, one after another, and the bytes of the bucket."""
    places: list[TensorInBucket] = []
    end = 0
    for tensor in tensors:
        places.append((tensor.name, tensor.dtype, tensor.shape, end))
        end += -(-prod(tensor.shape) * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
    return places, end


class _HeldRange(NamedTuple):
    """Consecutive indices of a tensor; ``holders`` are the ranks that have them, with the slot and the first index."""

    start: int
    stop: int
    dim: int
    dtype: str
    bytes_per_index: int
    holders: dict[int, tuple[int, int]]


def _held_ranges(sources: Sequence[Sequence[TensorPart]], dims: Mapping[str, int]) -> dict[str, list[_HeldRange]]:
    """By tensor, the parts that its sources have, in order."""
    parts: dict[str, dict[tuple[int, int], _HeldRange]] = defaultdict(dict)
    for rank, local in enumerate(sources):
        for slot, source in enumerate(local):
            dim = dims[source.name]
            weight = source.itemsize * prod(source.shape[:dim] + source.shape[dim + 1 :])
            for start, stop, offset in source.along(dim):
                new = _HeldRange(start, stop, dim, source.dtype, weight, {})
                parts[source.name].setdefault((start, stop), new).holders[rank] = (slot, offset)
    return {name: sorted(by_span.values(), key=lambda part: part.start) for name, by_span in parts.items()}


def _into(
    rank: int,
    slot: int,
    span: Span,
    name: str,
    parts: Sequence[_HeldRange],
    sent: Sequence[int],
    distance: Callable[[int, int], int],
) -> Iterator[Move]:
    """The moves that fill one span of a rank's slot."""
    reached = span.start
    for part in parts:
        first, last = max(reached, part.start), min(span.stop, part.stop)
        if first >= last:
            continue
        if part.start > reached:
            break
        nearest = min(part.holders, key=lambda holder: (distance(holder, rank), sent[holder], holder))
        sender = rank if rank in part.holders else nearest
        its_slot, offset = part.holders[sender]
        yield Move(
            dtype=part.dtype,
            dim=part.dim,
            length=last - first,
            nbytes=(last - first) * part.bytes_per_index,
            source_rank=sender,
            source_slot=its_slot,
            source_start=offset + first - part.start,
            target_rank=rank,
            target_slot=slot,
            target_start=span.offset + first - span.start,
        )
        reached = last
    if reached < span.stop:
        raise DataError(
            f"{name}: rank {rank} needs indices {span.start} to {span.stop} of dim {parts[0].dim}; no rank of the "
            f"source has index {reached}",
            name=name,
        )


def _dims(tensors: Iterable[TensorPart]) -> dict[str, int]:
    """The dim along which each tensor moves: the one that any rank divides it along."""
    dims: dict[str, set[int]] = defaultdict(set)
    for tensor in tensors:
        dims[tensor.name] |= set() if tensor.dim is None else {tensor.dim}
    for name, used in dims.items():
        if len(used) > 1:
            raise DataError(
                f"{name} is divided along dims {sorted(used)}; expected one dim on all ranks",
                name=name,
            )
    return {name: min(used, default=0) for name, used in dims.items()}
