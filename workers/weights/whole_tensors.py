"""Put whole tensors of a model together from the parts of all ranks.

Every rank reports the parts of tensors that it has (``workers.weights.shards``). From these reports all ranks plan the
same moves (``workers.weights.moves``), and the slices travel in all-to-all exchanges of bounded size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_state.agreement import all_gather_values
from workers.gpu_ids import node_id
from workers.weights.fingerprints import Fingerprint, shard_fingerprints, tensor_fingerprints
from workers.weights.moves import (
    Move,
    TensorInBucket,
    TensorPart,
    places_in_bucket,
    plan_buckets,
    whole_tensors,
)
from workers.weights.shards import SliceReader, WeightShard, whole_part

BucketMemory = Callable[[int], Tensor]
"""From a number of bytes to memory of at least as many, uint8 ``[bytes]``."""

Receivers = Literal["all", "first"] | Collection[int]
"""The ranks that get whole tensors: all of them, of each tensor the first with a part of it, or these ranks."""


def receives_all(receivers: Receivers, rank: int) -> bool:
    """Whether a rank gets all tensors."""
    return receivers == "all" or (not isinstance(receivers, str) and rank in receivers)


class PolicyWeights(ABC):
    """All tensors of a policy, under their Hugging Face names for an engine.

    Iterating yields every tensor of the whole model, one bucket in memory at a time; no rank ever has the whole model.
    It is a collective: every rank must iterate until the end. A tensor is valid until the next one, so copy what you
    keep.

    Attributes:
        device: of the tensors that iterating yields.
    """

    device: torch.device

    @abstractmethod
    def buckets(self, memory: BucketMemory, receivers: Receivers = "all") -> Iterator[list[TensorInBucket]]:
        """Iterate over the buckets that this rank gets: the places of tensors in the memory that it was filled into.

        It is a collective, as iterating is.

        Args:
            memory: returns the memory of a bucket.
            receivers: the ranks that get whole tensors, the same on every rank.
        """

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over names and whole tensors, on every rank; no memory is shared with the model."""
        return tensors_in(self.buckets, self.device)


class WholeTensors(PolicyWeights):
    """Tensors that are put together from the parts of all ranks, as often as they are read.

    Ranks exchange which parts they have at the first time, and again only if the parts of a rank have changed.

    Args:
        shards: returns this rank's parts; called at the start of every reading.
        bucket_bytes: the size of a bucket; a larger tensor has one for itself.
    """

    def __init__(self, shards: Callable[[], Sequence[WeightShard]], bucket_bytes: int = 64 << 20) -> None:
        self._shards, self._bucket_bytes = shards, bucket_bytes
        self.device = torch.device(torch.cuda.current_device())
        self._planned_for: tuple[list[TensorPart], Receivers] | None = None
        self._wanted: list[TensorPart] = []
        self._buckets: tuple[tuple[Move, ...], ...] = ()

    @torch.no_grad()
    def buckets(self, memory: BucketMemory, receivers: Receivers = "all") -> Iterator[list[TensorInBucket]]:
        """Iterate over the buckets; see ``PolicyWeights.buckets``."""
        shards = self._shards()
        mine = [shard.part for shard in shards], receivers
        if any(all_gather_values(mine != self._planned_for)):
            self._make_schedule(*mine)
        rank, sources = dist.get_rank(), SliceReader(shards)
        for bucket in self._buckets:
            arriving = exchanged([move for move in bucket if move.source_rank != move.target_rank], sources)
            kept = [(move, sources.read(move)) for move in bucket if move.source_rank == rank == move.target_rank]
            slots = sorted({move.target_slot for move in bucket if move.target_rank == rank})
            if slots:
                tensors = {slot: self._wanted[slot] for slot in slots}
                yield filled_bucket(tensors, [*kept, *arriving], memory, self.device)

    def fingerprints(self, dtypes: Mapping[str, Collection[str]]) -> list[Fingerprint]:
        """Return the fingerprints of this rank's parts; see ``shard_fingerprints``."""
        return shard_fingerprints(self._shards(), dtypes)

    def _make_schedule(self, mine: list[TensorPart], receivers: Receivers) -> None:
        sources, nodes = zip(*all_gather_values((mine, node_id())), strict=True)
        first: dict[str, int] = {}
        for rank, tensors in enumerate(sources):
            for tensor in tensors:
                first.setdefault(tensor.name, rank)
        whole = whole_tensors(sources)
        targets = [
            [
                tensor
                for tensor in whole
                if receives_all(receivers, rank) or (receivers == "first" and first[tensor.name] == rank)
            ]
            for rank in range(len(sources))
        ]
        self._wanted, self._planned_for = targets[dist.get_rank()], (mine, receivers)
        self._buckets = ()
        if any(targets):
            self._buckets = plan_buckets(
                sources,
                targets,
                self._bucket_bytes,
                lambda source, target: int(nodes[source] != nodes[target]),
                whole=True,
            )


class StreamedTensors(PolicyWeights):
    """Whole tensors that are read one after another: from files, or as Megatron-Bridge converts them.

    Args:
        tensors: iterates over names and tensors.
        bucket_bytes: the size of a bucket; a larger tensor has one for itself.
        collective: whether every rank must iterate until the end, also a rank that gets no tensors.
    """

    def __init__(
        self, tensors: Callable[[], Iterator[tuple[str, Tensor]]], bucket_bytes: int, *, collective: bool = False
    ) -> None:
        self._tensors, self._bucket_bytes, self._collective = tensors, bucket_bytes, collective
        self.device = torch.device(torch.cuda.current_device())

    def buckets(self, memory: BucketMemory, receivers: Receivers = "all") -> Iterator[list[TensorInBucket]]:
        """Iterate over the buckets; see ``PolicyWeights.buckets``. Rank 0 is the first with a part of any tensor."""
        if not receives_all((0,) if receivers == "first" else receivers, dist.get_rank()):
            for _ in self._tensors() if self._collective else ():
                pass
            return
        bucket: list[tuple[str, Tensor]] = []
        for name, tensor in self._tensors():
            if bucket and sum(held.nbytes for _, held in bucket) + tensor.nbytes > self._bucket_bytes:
                yield _copied(bucket, memory)
                bucket = []
            bucket.append((name, tensor))
        if bucket:
            yield _copied(bucket, memory)

    def fingerprints(self, dtypes: Mapping[str, Collection[str]]) -> list[Fingerprint]:
        """Return the fingerprints of all tensors; see ``shard_fingerprints``."""
        return tensor_fingerprints(self._tensors(), dtypes)


def _copied(tensors: Sequence[tuple[str, Tensor]], memory: BucketMemory) -> list[TensorInBucket]:
    places, nbytes = places_in_bucket(whole_part(name, tensor) for name, tensor in tensors)
    room = memory(nbytes)
    for place, (_, tensor) in zip(places, tensors, strict=True):
        tensor_in(room, place).copy_(tensor)
    return places


def filled_bucket(
    tensors: Mapping[int, TensorPart],
    moves: Iterable[tuple[Move, Tensor]],
    memory: BucketMemory,
    device: torch.device,
) -> list[TensorInBucket]:
    """Put the tensors of a bucket together, and return their places in the memory.

    On a GPU they are put together there, and copied to memory of the host as a whole.

    Args:
        tensors: by slot.
        moves: the slices that fill them, and their values.
        memory: returns the memory of the bucket.
        device: of the values.
    """
    places, nbytes = places_in_bucket(tensors.values())
    room = memory(nbytes)[:nbytes]
    filling = room if room.device == device else torch.empty(nbytes, dtype=torch.uint8, device=device)
    whole = {slot: tensor_in(filling, place) for slot, place in zip(tensors, places, strict=True)}
    for move, values in moves:
        target = whole[move.target_slot].narrow(move.dim, move.target_start, move.length)
        target.copy_(values.view(target.shape) if values.dim() == 1 else values)
    if filling is not room:
        room.copy_(filling, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    return places


def tensors_in(
    buckets: Callable[[BucketMemory], Iterator[list[TensorInBucket]]], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the names and tensors of all buckets, in memory of the device."""
    filled = torch.empty(0, dtype=torch.uint8)

    def memory(nbytes: int) -> Tensor:
        nonlocal filled
        filled = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return filled

    for bucket in buckets(memory):
        for place in bucket:
            yield place[0], tensor_in(filled, place)


def tensor_in(memory: Tensor, place: TensorInBucket) -> Tensor:
    """Return a tensor of a bucket, which shares its memory."""
    _, name, shape, start = place
    dtype: torch.dtype = getattr(torch, name)
    return memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def exchanged(bucket: Sequence[Move], sources: SliceReader) -> list[tuple[Move, Tensor]]:
    """Exchange the moves of one bucket (a collective); return the moves to this rank with their values, flat."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if not bucket:
        return []
    # Sorted by the other rank, and for each rank in the order of the schedule: the same order on both sides.
    outbound = sorted((move for move in bucket if move.source_rank == rank), key=lambda move: move.target_rank)
    inbound = sorted((move for move in bucket if move.target_rank == rank), key=lambda move: move.source_rank)
    dtype: torch.dtype = getattr(torch, bucket[0].dtype)
    out_sizes, in_sizes = ([0] * world_size for _ in range(2))
    for move in outbound:
        out_sizes[move.target_rank] += move.nbytes // dtype.itemsize
    for move in inbound:
        in_sizes[move.source_rank] += move.nbytes // dtype.itemsize
    device = torch.cuda.current_device()
    outgoing = torch.empty(sum(out_sizes), dtype=dtype, device=device)
    incoming = torch.empty(sum(in_sizes), dtype=dtype, device=device)
    for move, part in zip(outbound, outgoing.split([move.nbytes // dtype.itemsize for move in outbound]), strict=True):
        source = sources.read(move)
        part.view(source.shape).copy_(source)
    dist.all_to_all_single(incoming, outgoing, in_sizes, out_sizes)
    return list(zip(inbound, incoming.split([move.nbytes // dtype.itemsize for move in inbound]), strict=True))
