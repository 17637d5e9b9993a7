"""Schedule which rank of one group sends which slices to which rank of another; pure, without tensors or processes.

The ranks of both groups are numbered in one list: first the source's, then the target's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from workers.weights.moves import (
    Move,
    TensorPart,
    plan_buckets,
    whole_tensors,
)

ALIGNMENT = 64
"""[bytes] The start of a bucket in the memory that has two of them."""


class ServedEngine(NamedTuple):
    """An engine that gets weights.

    Attributes:
        dtype, itemsize: the dtype that it computes in, and the bytes of an element.
        bucket_bytes: the size of the buckets that it reads.
        model: the ``ModelConfig`` and the ``ParallelConfig`` of its worker.
    """

    dtype: str
    itemsize: int
    bucket_bytes: int
    model: tuple[Any, Any]


class RankWeights(NamedTuple):
    """The tensors that a rank has, and where it runs.

    Attributes:
        tensors: its tensors, in the order of their slots.
        node: the id of its node.
        pid: its process.
        device: ``"cpu"``, or the unique id of its GPU.
        verify: whether its weights are verified after a transfer to it.
        visible: the unique ids of the GPUs that its process can use, in their order there.
        engine: the engine that it serves, which gets whole tensors with Hugging Face names; ``tensors`` is empty then.
        nccl_host: the ``NCCL_HOSTID`` of its process, if that is set: NCCL takes ranks of two hosts on one GPU.
    """

    tensors: tuple[TensorPart, ...]
    node: str
    pid: int
    device: str
    verify: bool = True
    visible: tuple[str, ...] = ()
    engine: ServedEngine | None = None
    nccl_host: str = ""


class PeerSlices(NamedTuple):
    """The part of a bucket that one rank sends to another.

    Attributes:
        peer: the other rank.
        start: the first byte in the bucket of the rank that has them.
        nbytes: its length.
        moves: its slices, one after the other.
    """

    peer: int
    start: int
    nbytes: int
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class RankSchedule:
    """What one rank sends or receives in a transfer, and how: with it, it opens its end.

    Attributes:
        transfer: the id of the transfer.
        transport: the name of the transport.
        rank, size: its number among the ranks of both groups, and how many these are.
        sources: how many of the ranks send: the first ones.
        buckets: the slices of each bucket, in the order in which they travel.
        timeout: seconds after which setting up a connection fails.
        hf_names: whether the tensors are named and divided as in a Hugging Face checkpoint.
        whole: the tensors that an engine gets, in the order of their slots; none without an engine.
        exchanges: by bucket, the slices that ranks of the source send each other first; empty if there are none.
    """

    transfer: str
    transport: str
    rank: int
    size: int
    sources: int
    buckets: tuple[tuple[PeerSlices, ...], ...]
    timeout: float
    hf_names: bool = False
    whole: tuple[TensorPart, ...] = ()
    exchanges: tuple[tuple[Move, ...], ...] = ()

    @property
    def sends(self) -> bool:
        """Whether the rank belongs to the source."""
        return self.rank < self.sources

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The ranks that this one sends to or receives from."""
        return tuple(sorted({slices.peer for bucket in self.buckets for slices in bucket}))

    @cached_property
    def bucket_bytes(self) -> int:
        """The length of the largest bucket, rounded up so that a second one after it is aligned for any dtype."""
        most = max((sum(slices.nbytes for slices in bucket) for bucket in self.buckets), default=0)
        return -(-most // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class TransferSchedule:
    """All slices that one transfer moves.

    Attributes:
        source_size, target_size: number of ranks of the groups.
        buckets: see ``plan_buckets``.
        targets: by rank of the target, the tensors that it gets.
        relays: by number of a rank of the target, the rank of the source on its GPU that sends it everything, also
            what that rank gets from other ranks of the source; empty if ranks send what they have themselves.
    """

    source_size: int
    target_size: int
    buckets: tuple[tuple[Move, ...], ...]
    targets: tuple[tuple[TensorPart, ...], ...]
    relays: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def by_rank(self) -> tuple[tuple[tuple[PeerSlices, ...], ...], ...]:
        """By rank, the buckets that it sends (a rank of the source) or receives (of the target).

        With relays, a rank of the source has all buckets, also those in which it sends nothing.
        """
        ranks: list[list[tuple[PeerSlices, ...]]] = [[] for _ in range(self.source_size + self.target_size)]
        for bucket in self.buckets:
            moves: dict[int, dict[int, list[Move]]] = defaultdict(lambda: defaultdict(list))
            for move in bucket:
                sender = self.sender_of(move)
                moves[sender][move.target_rank].append(move)
                moves[move.target_rank][sender].append(move)
            for rank in range(self.source_size) if self.relays else ():
                moves.setdefault(rank, {})
            for rank, by_peer in moves.items():
                ranks[rank].append(_by_peer(by_peer))
        return tuple(tuple(buckets) for buckets in ranks)

    @cached_property
    def exchanges(self) -> tuple[tuple[Move, ...], ...]:
        """By bucket, the moves between ranks of the source, to the relays; empty without relays."""
        if not self.relays:
            return ()
        return tuple(
            tuple(
                move._replace(target_rank=self.sender_of(move))
                for move in bucket
                if self.sender_of(move) != move.source_rank
            )
            for bucket in self.buckets
        )

    def sender_of(self, move: Move) -> int:
        """Return the rank that a rank of the target gets a slice from."""
        return self.relays.get(move.target_rank, move.source_rank)

    @property
    def nbytes(self) -> int:
        """The bytes that are sent: of all tensors of all ranks of the target."""
        return sum(move.nbytes for move in chain(*self.buckets))

    @cached_property
    def routes(self) -> dict[tuple[int, int], int]:
        """The bytes from each rank of the source to each rank of the target, counted from 0."""
        routes: dict[tuple[int, int], int] = defaultdict(int)
        for move in chain(*self.buckets):
            routes[move.source_rank, move.target_rank - self.source_size] += move.nbytes
        return dict(sorted(routes.items()))


def schedule_transfer(
    sources: Sequence[RankWeights], targets: Sequence[RankWeights], bucket_bytes: int, *, relayed: bool = False
) -> TransferSchedule:
    """Return the moves that fill every rank of the target group from the ranks of the source group.

    A tensor that has a smaller dtype in the target is converted by the sender. Of several ranks that have a slice, one
    on the same GPU sends it, or else one on the same node. A rank with an engine gets whole tensors, of which each is
    complete in one bucket.

    Args:
        sources: by rank, what the group has that weights come from; with Hugging Face names if engines get them.
        targets: by rank, what the group has that weights go to.
        bucket_bytes: most bytes that a rank sends, and most that it receives, at once.
        relayed: a rank of the target gets everything from a rank of the source on its GPU, if there is one.

    Raises:
        DataError: the two are not the same model.
    """
    ranks = (*sources, *targets)
    engines = [target.engine for target in targets if target.engine is not None]
    wanted = _engine_tensors(sources, targets) if engines else tuple(target.tensors for target in targets)
    received = {tensor.name: tensor for tensor in chain(*wanted)}
    sent = [[_in_smaller_dtype(tensor, received.get(tensor.name)) for tensor in source.tensors] for source in sources]
    from_ranks = [*sent, *([] for _ in targets)]
    to_ranks = [*([] for _ in sources), *map(list, wanted)]

    def distance(one: int, other: int) -> int:
        return _distance(ranks[one], ranks[other])

    limit = min([bucket_bytes, *(engine.bucket_bytes for engine in engines)])
    buckets = plan_buckets(from_ranks, to_ranks, limit, distance, whole=bool(engines))
    relays = _relays(sources, targets, buckets) if relayed else {}
    return TransferSchedule(len(sources), len(targets), buckets, wanted, relays)


def _relays(
    sources: Sequence[RankWeights], targets: Sequence[RankWeights], buckets: Sequence[Sequence[Move]]
) -> dict[int, int]:
    """By number of a rank of the target, a rank of the source on its GPU; empty if no slice comes from another GPU."""
    on_gpu = {(source.node, source.device): rank for rank, source in enumerate(sources)}
    places = {len(sources) + rank: (target.node, target.device) for rank, target in enumerate(targets)}
    relays = {number: on_gpu[place] for number, place in places.items() if place in on_gpu}
    needed = any(relays.get(move.target_rank, move.source_rank) != move.source_rank for move in chain(*buckets))
    return relays if needed else {}


def _engine_tensors(
    sources: Sequence[RankWeights], targets: Sequence[RankWeights]
) -> tuple[tuple[TensorPart, ...], ...]:
    """By rank of the target, all tensors of the source in the smaller one of both dtypes; none without an engine."""
    whole = whole_tensors([source.tensors for source in sources])

    def received(engine: ServedEngine) -> tuple[TensorPart, ...]:
        converted = (tensor._replace(dtype=engine.dtype, itemsize=engine.itemsize) for tensor in whole)
        return tuple(_in_smaller_dtype(*pair) for pair in zip(whole, converted, strict=True))

    return tuple(() if target.engine is None else received(target.engine) for target in targets)


def _distance(one: RankWeights, other: RankWeights) -> int:
    if one.node != other.node:
        return 2
    return int(one.device != other.device)


def _in_smaller_dtype(source: TensorPart, target: TensorPart | None) -> TensorPart:
    """The source's tensor in the smaller one of both dtypes."""
    if target is None or target.itemsize >= source.itemsize:
        return source
    return source._replace(dtype=target.dtype, itemsize=target.itemsize)


def _by_peer(by_peer: dict[int, list[Move]]) -> tuple[PeerSlices, ...]:
    of_peers, start = [], 0
    for peer, moves in sorted(by_peer.items()):
        nbytes = sum(move.nbytes for move in moves)
        of_peers.append(PeerSlices(peer, start, nbytes, tuple(moves)))
        start += nbytes
    return tuple(of_peers)
