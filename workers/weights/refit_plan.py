"""Which rank sends which slice of which tensor to whom, so that the weights of one layout become those of another.

The planning half of ``workers.weights.refit``: pure, the same on every rank, and without tensors or processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from math import prod
from typing import NamedTuple

from mcontroller.errors import DataError

__all__ = ["Held", "Move", "RefitPlan", "Span", "plan_refit", "spans_of"]


class Span(NamedTuple):
    """Consecutive indices of a tensor's cut dim: from ``start`` to before ``stop``, kept from ``offset`` on."""

    start: int
    stop: int
    offset: int


class Held(NamedTuple):
    """What one rank holds of one tensor of the whole model.

    Attributes:
        name, shape: the tensor's in the whole model, without padding.
        dtype, itemsize: the name of its type, and the bytes of an element.
        dim: the dim that it is cut along; None where the rank has all of it.
        spans: which parts of that dim the rank has; padding is in none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    dim: int | None = None
    spans: tuple[Span, ...] = ()

    def along(self, dim: int) -> tuple[Span, ...]:
        """The parts it has of ``dim``, which is its own or that of ranks that hold less."""
        return (Span(0, self.shape[dim], 0),) if self.dim is None else self.spans


class Move(NamedTuple):
    """``length`` indices along ``dim``, from a rank's tensor number ``source_slot`` to another's ``target_slot``.

    ``source_start`` and ``target_start`` count in those ranks' own tensors. ``dtype`` and ``nbytes`` are the source's.
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


@dataclass(frozen=True)
class RefitPlan:
    """Everything that moves.

    Attributes:
        copies: from a rank to itself.
        buckets: from rank to rank, of one dtype each. In one bucket no rank sends or receives more than the limit that
            was asked for.
        least_bytes: of every rank, what its target parts hold and its source parts do not: less cannot be sent.
    """

    copies: tuple[Move, ...]
    buckets: tuple[tuple[Move, ...], ...]
    least_bytes: int

    def sent_by(self, rank: int) -> int:
        """Bytes that one rank sends to others."""
        return sum(move.nbytes for move in chain.from_iterable(self.buckets) if move.source_rank == rank)


def spans_of(length: int, pieces: int, size: int, index: int, limit: int) -> tuple[Span, ...]:
    """What rank ``index`` of ``size`` holds: ``length`` indices, equally of each of ``pieces`` stacked tensors.

    Indices of the whole from ``limit`` on are padding and are left out.
    """
    each = length // pieces
    starts = [piece * each * size + index * each for piece in range(pieces)]
    spans = [Span(start, min(start + each, limit), piece * each) for piece, start in enumerate(starts)]
    return tuple(span for span in spans if span.stop > span.start)


def plan_refit(sources: Sequence[Sequence[Held]], targets: Sequence[Sequence[Held]], bucket_bytes: int) -> RefitPlan:
    """The moves that fill every target with what the sources hold.

    A part that a rank has already is copied where it is. Of the ranks that hold a part alike, the one that has sent
    the least so far sends it.

    Args:
        sources, targets: by rank, what it holds in the one layout and in the other; a slot is a place in that list.
        bucket_bytes: the most that a rank sends, and the most that it receives, at once; one index of a tensor's dim
            is never divided.

    Raises:
        DataError: the two are not the same model, or no source holds a part of a tensor; with the names.
    """
    _check_same_model(sources, targets)
    dims = _dims(chain(*sources, *targets))
    parts = _parts(sources, dims)
    sent = [0] * len(sources)
    copies: list[Move] = []
    moves: list[list[Move]] = [[] for _ in targets]
    for rank, held in enumerate(targets):
        for slot, target in enumerate(held):
            for span in target.along(dims[target.name]):
                for move in _into(rank, slot, span, parts[target.name], sent):
                    (copies if move.source_rank == rank else moves[rank]).append(move)
                    sent[move.source_rank] += move.nbytes if move.source_rank != rank else 0
            _check_filled(target, rank, dims[target.name], parts[target.name])
    least = sum(move.nbytes for move in chain(*moves))
    return RefitPlan(tuple(copies), tuple(_buckets(moves, bucket_bytes)), least)


class _Part(NamedTuple):
    """A part of a tensor, and by rank who holds it: in which slot, from which index of its own on."""

    start: int
    stop: int
    dim: int
    dtype: str
    bytes_per_index: int
    holders: dict[int, tuple[int, int]]


def _parts(sources: Sequence[Sequence[Held]], dims: Mapping[str, int]) -> dict[str, list[_Part]]:
    """Of every tensor, the parts that its sources hold, in order."""
    parts: dict[str, dict[tuple[int, int], _Part]] = defaultdict(dict)
    for rank, held in enumerate(sources):
        for slot, source in enumerate(held):
            dim = dims[source.name]
            weight = source.itemsize * prod(source.shape[:dim] + source.shape[dim + 1 :])
            for start, stop, offset in source.along(dim):
                new = _Part(start, stop, dim, source.dtype, weight, {})
                parts[source.name].setdefault((start, stop), new).holders[rank] = (slot, offset)
    return {name: sorted(found.values(), key=lambda part: part.start) for name, found in parts.items()}


def _into(rank: int, slot: int, span: Span, parts: Sequence[_Part], sent: Sequence[int]) -> Iterator[Move]:
    """What fills one span of a rank's slot."""
    reached = span.start
    for part in parts:
        first, last = max(reached, part.start), min(span.stop, part.stop)
        if first >= last:
            continue
        sender = rank if rank in part.holders else min(part.holders, key=lambda holder: (sent[holder], holder))
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


def _buckets(moves: Sequence[Sequence[Move]], limit: int) -> Iterator[tuple[Move, ...]]:
    """The moves (by target rank) in slices, so ordered that all ranks send and receive side by side.

    Every rank receives from the rank after it first, and from the rank before it last. A slice goes into the bucket
    that its two ranks have reached, or the next one.
    """
    world_size = len(moves)
    ordered = [sorted(own, key=lambda move: (move.source_rank - move.target_rank) % world_size) for own in moves]
    in_turn = [move for turn in zip_longest(*ordered) for move in turn if move is not None]
    for dtype in sorted({move.dtype for move in in_turn}):
        buckets: list[list[Move]] = []
        going, coming = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)  # bytes by bucket
        for move in in_turn:
            if move.dtype == dtype:
                _place(move, buckets, going[move.source_rank], coming[move.target_rank], limit)
        yield from (tuple(bucket) for bucket in buckets)


def _place(move: Move, buckets: list[list[Move]], going: list[int], coming: list[int], limit: int) -> None:
    """Put the move into buckets, in slices that fill them up, from the one that its two ranks have reached."""
    per_index, done = move.nbytes // move.length, 0
    index = max(len(going), len(coming), 1) - 1
    while done < move.length:
        for filled in (going, coming):
            filled += [0] * (index + 1 - len(filled))
        buckets += [[] for _ in range(index + 1 - len(buckets))]
        taken = max(going[index], coming[index])
        length = min((limit - taken) // per_index, move.length - done)
        if length <= 0 and taken == 0:
            length = 1  # an index alone weighs more than the limit
        if length > 0:
            part = move._replace(
                length=length,
                nbytes=length * per_index,
                source_start=move.source_start + done,
                target_start=move.target_start + done,
            )
            buckets[index].append(part)
            going[index] += part.nbytes
            coming[index] += part.nbytes
            done += length
        index += 1


def _dims(held: Iterable[Held]) -> dict[str, int]:
    """The dim along which each tensor moves: the one that any rank cuts it along."""
    dims: dict[str, set[int]] = defaultdict(set)
    for tensor in held:
        dims[tensor.name] |= set() if tensor.dim is None else {tensor.dim}
    for name, found in dims.items():
        if len(found) > 1:
            raise DataError(
                f"{name} is cut along dims {sorted(found)}; it can move only where all ranks cut it along one",
                name=name,
            )
    return {name: min(found, default=0) for name, found in dims.items()}


def _check_same_model(sources: Sequence[Sequence[Held]], targets: Sequence[Sequence[Held]]) -> None:
    have, need = ({held.name: held.shape for held in chain(*model)} for model in (sources, targets))
    missing, unexpected = sorted(need.keys() - have.keys()), sorted(have.keys() - need.keys())
    differing = [
        f"{name} is {have[name]}, the target's is {need[name]}"
        for name in sorted(have.keys() & need.keys())
        if have[name] != need[name]
    ]
    if missing or unexpected or differing:
        raise DataError(
            f"source and target are not the same model: the source lacks {missing or 'none'}, the target lacks "
            f"{unexpected or 'none'}; of another shape {differing or 'none'}",
            missing=missing,
            unexpected=unexpected,
            differing=differing,
        )


def _check_filled(target: Held, rank: int, dim: int, parts: Sequence[_Part]) -> None:
    for span in target.along(dim):
        reached = span.start
        for part in parts:
            if part.start <= reached:
                reached = max(reached, part.stop)
        if reached < span.stop:
            raise DataError(
                f"{target.name}: rank {rank} needs indices {span.start} to {span.stop} of dim {dim}; no rank of the "
                f"source holds index {reached}",
                name=target.name,
            )
