"""Plan which rank of one group sends which slices to which rank of another; pure, without tensors or processes.

The ranks of both groups are numbered in one list: those of the source first, then those of the target.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from typing import NamedTuple

from workers.weights.refit_plan import LocalTensor, Move, check_known, in_buckets, interleaved, plan_moves

__all__ = ["Holdings", "Parcel", "Piece", "TransferPlan", "is_large", "plan_transfer"]


class Holdings(NamedTuple):
    """What a rank has, and where it runs.

    Attributes:
        tensors: its tensors, in the order of their slots.
        unknown: names of tensors whose position in the whole model is unknown.
        node: the id of its node.
        pid: its process.
        device: ``"cpu"``, or the unique id of its GPU.
        verify: whether its weights are verified after a transfer to it.
        visible: the unique ids of the GPUs that its process can use, in their order there.
    """

    tensors: tuple[LocalTensor, ...]
    unknown: tuple[str, ...]
    node: str
    pid: int
    device: str
    verify: bool = True
    visible: tuple[str, ...] = ()


MESSAGE_BYTES = 1 << 20
"""Slices of this size or more are messages of their own, so that a rank can send or receive them without a copy."""


def is_large(move: Move) -> bool:
    """Return whether a slice is a message of its own."""
    return move.nbytes >= MESSAGE_BYTES


class Parcel(NamedTuple):
    """The part of a bucket that one rank sends to another.

    Attributes:
        peer: the other rank.
        start: the first byte in the bucket of the rank that the parcel belongs to.
        nbytes: its length.
        moves: its slices, one after the other.
    """

    peer: int
    start: int
    nbytes: int
    moves: tuple[Move, ...]

    def messages(self) -> list[Piece]:
        """Divide the parcel into messages; both ranks divide it in the same way."""
        messages: list[Piece] = []
        start = 0
        for move in self.moves:
            large = move if is_large(move) else None
            if large is None and messages and messages[-1].move is None:
                last = messages[-1]
                messages[-1] = last._replace(nbytes=last.nbytes + move.nbytes)
            else:
                messages.append(Piece(start, move.nbytes, large))
            start += move.nbytes
        return messages


class Piece(NamedTuple):
    """A part of a parcel that travels as one message.

    Attributes:
        start: the first byte in the parcel.
        nbytes: its length.
        move: its only slice if that is large; None for small slices, one after the other.
    """

    start: int
    nbytes: int
    move: Move | None


@dataclass(frozen=True)
class TransferPlan:
    """All slices that one transfer moves.

    Attributes:
        source_size, target_size: number of ranks of the groups.
        buckets: moves of one dtype each; in one bucket no rank sends or receives more than the limit.
        least_bytes: over all ranks of the target, the bytes of what they have. No plan sends less.
        direct: moves that travel from the memory of one rank's weights to that of the other's, whole and outside of
            the buckets, in one order for all ranks, so that they do not wait for each other in a circle.
    """

    source_size: int
    target_size: int
    buckets: tuple[tuple[Move, ...], ...]
    least_bytes: int
    direct: tuple[Move, ...] = ()

    @cached_property
    def by_rank(self) -> tuple[tuple[tuple[Parcel, ...], ...], ...]:
        """By rank, the buckets that it sends (a rank of the source) or receives (of the target), as parcels."""
        ranks: list[list[tuple[Parcel, ...]]] = [[] for _ in range(self.source_size + self.target_size)]
        for bucket in self.buckets:
            moves: dict[int, dict[int, list[Move]]] = defaultdict(lambda: defaultdict(list))
            for move in bucket:
                moves[move.source_rank][move.target_rank].append(move)
                moves[move.target_rank][move.source_rank].append(move)
            for rank, by_peer in moves.items():
                ranks[rank].append(_parcels(by_peer))
        return tuple(tuple(buckets) for buckets in ranks)

    @cached_property
    def direct_by_rank(self) -> tuple[tuple[Move, ...], ...]:
        """By rank, the direct moves that it sends or receives."""
        ranks: list[list[Move]] = [[] for _ in range(self.source_size + self.target_size)]
        for move in self.direct:
            ranks[move.source_rank].append(move)
            ranks[move.target_rank].append(move)
        return tuple(tuple(moves) for moves in ranks)

    @cached_property
    def routes(self) -> dict[tuple[int, int], int]:
        """The bytes from each rank of the source to each rank of the target, which is counted from 0 here."""
        routes: dict[tuple[int, int], int] = defaultdict(int)
        for move in chain(self.direct, *self.buckets):
            routes[move.source_rank, move.target_rank - self.source_size] += move.nbytes
        return dict(sorted(routes.items()))


def plan_transfer(
    sources: Sequence[Holdings], targets: Sequence[Holdings], bucket_bytes: int, *, direct: bool = False
) -> TransferPlan:
    """Return the moves that fill every rank of the target group from the ranks of the source group.

    A tensor that has a smaller dtype in the target is converted by the sender. Of several ranks that have a slice, one
    on the same GPU sends it, or else one on the same node.

    Args:
        sources: by rank, what the group has that weights come from.
        targets: by rank, what the group has that weights go to.
        bucket_bytes: most bytes that a rank sends, and most that it receives, at once.
        direct: whether large slices that are contiguous and of the same dtype on both sides travel without a bucket,
            and then without its limit: they need no memory but that of the weights.

    Raises:
        DataError: the two are not the same model, or the position of a weight in the whole model is unknown.
    """
    check_known(sorted({name for each in (*sources, *targets) for name in each.unknown}))
    smaller = {tensor.name: tensor for each in targets for tensor in each.tensors}
    sending = [[_on_the_way(tensor, smaller.get(tensor.name)) for tensor in each.tensors] for each in sources]
    none: list[list[LocalTensor]] = [[] for _ in targets]
    receiving = [*([] for _ in sources), *(list(each.tensors) for each in targets)]
    everyone = (*sources, *targets)
    _, moves = plan_moves([*sending, *none], receiving, lambda one, other: _distance(everyone[one], everyone[other]))
    ordered = interleaved(moves)
    whole = {move for move in ordered if direct and _needs_no_bucket(move, everyone)}
    return TransferPlan(
        len(sources),
        len(targets),
        tuple(in_buckets([move for move in ordered if move not in whole], bucket_bytes)),
        sum(move.nbytes for move in ordered),
        tuple(move for move in ordered if move in whole),
    )


def _distance(one: Holdings, other: Holdings) -> int:
    if one.node != other.node:
        return 2
    return int(one.device != other.device)


def _needs_no_bucket(move: Move, everyone: Sequence[Holdings]) -> bool:
    """Whether both ranks have the slice in contiguous memory, in the same dtype."""
    source = everyone[move.source_rank].tensors[move.source_slot]
    target = everyone[move.target_rank].tensors[move.target_slot]
    same = source.dtype == target.dtype
    return is_large(move) and same and _is_contiguous(move, source) and _is_contiguous(move, target)


def _is_contiguous(move: Move, tensor: LocalTensor) -> bool:
    length = sum(span.stop - span.start for span in tensor.along(move.dim))  # padding is along dim 0 only
    return tensor.contiguous and (prod(tensor.shape[: move.dim]) == 1 or move.length == length)


def _on_the_way(source: LocalTensor, target: LocalTensor | None) -> LocalTensor:
    """The source's tensor in the smaller one of both dtypes."""
    if target is None or target.itemsize >= source.itemsize:
        return source
    return source._replace(dtype=target.dtype, itemsize=target.itemsize)


def _parcels(by_peer: dict[int, list[Move]]) -> tuple[Parcel, ...]:
    parcels, start = [], 0
    for peer, moves in sorted(by_peer.items()):
        nbytes = sum(move.nbytes for move in moves)
        parcels.append(Parcel(peer, start, nbytes, tuple(moves)))
        start += nbytes
    return tuple(parcels)
