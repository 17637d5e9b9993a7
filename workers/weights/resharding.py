"""Copy the weights of a model to another layout in the same processes, or put whole tensors together.

Every rank reports the parts of tensors that it has (``workers.weights.shards``). From these reports all ranks make the
same schedule (``workers.weights.resharding_schedule``), and the slices travel in all-to-all exchanges of bounded size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_state.agreement import all_gather_values
from parallel_state.megatron import MegatronContext
from workers.gpu_ids import node_id
from workers.weights.resharding_schedule import (
    LocalTensor,
    Move,
    ReshardingSchedule,
    TensorInBucket,
    check_known,
    places_in_bucket,
    plan_whole,
    schedule_resharding,
    whole_tensors,
)
from workers.weights.shards import SliceReader, WeightShard, model_shards, unknown_positions

BucketMemory = Callable[[int], Tensor]
"""From a number of bytes to memory of at least as many, uint8 ``[bytes]``."""

Wanted = Literal["all", "none", "first"]


class InBuckets(Protocol):
    """Whole tensors that arrive in buckets."""

    def buckets(self, memory: BucketMemory, wanted: Wanted = "all") -> Iterator[list[TensorInBucket]]:
        """Iterate over the buckets; see ``WholeTensors.buckets``."""
        ...


@dataclass(frozen=True)
class ReshardingReport:
    """The cost of one resharding, the same on every rank.

    Attributes:
        bytes_sent: bytes sent from one rank to another, over all ranks, counted when they were sent.
        least_bytes: bytes that ranks need in the target's layout and do not have in the source's, over all ranks.
        seconds: wall-clock time of the slowest rank.
    """

    bytes_sent: int
    least_bytes: int
    seconds: float


class Resharding:
    """Copies of the weights of one layout's model to another's: scheduled once, run whenever the source has changed.

    Building one and running it are collective over all ranks of torch.distributed. For the way back, build another one
    with the arguments exchanged; a target that is trained must then copy the weights into its optimizer
    (``optimizer.reload_model_params()``). If dtypes differ, ``copy_`` converts to the target's.

    Args:
        source_chunks: this rank's model chunks in the layout that weights come from, wrapped or not.
        source_context: that layout.
        target_chunks: this rank's chunks in the layout that weights go to. Parameters and persistent buffers are
            copied.
        target_context: that layout.
        bucket_bytes: most bytes that a rank sends, and most that it receives, at once. At most twice that memory is
            needed.

    Raises:
        DataError: on every rank, with the names: the two are not the same model, or the position of a weight in the
            whole model is unknown.
    """

    def __init__(
        self,
        source_chunks: Sequence[nn.Module],
        source_context: MegatronContext,
        target_chunks: Sequence[nn.Module],
        target_context: MegatronContext,
        *,
        bucket_bytes: int = 64 << 20,
    ) -> None:
        self._sources = model_shards(source_chunks, source_context)
        self._targets = model_shards(target_chunks, target_context)
        mine = [[shard.described() for shard in shards] for shards in (self._sources, self._targets)]
        unknown = unknown_positions(self._sources) + unknown_positions(self._targets)
        all_sources, all_targets, all_unknown = zip(*all_gather_values((*mine, unknown)), strict=True)
        check_known(sorted({name for names in all_unknown for name in names}))
        self.schedule: ReshardingSchedule = schedule_resharding(all_sources, all_targets, bucket_bytes)

    @torch.no_grad()
    def run(self) -> ReshardingReport:
        """Copy the current weights of the source to the target (a collective)."""
        torch.cuda.synchronize()  # the device may still run what was called before
        start = time.perf_counter()
        rank, sent, sources = dist.get_rank(), 0, SliceReader(self._sources)
        for move in self.schedule.copies:
            if move.target_rank == rank:
                self._target(move).copy_(_source(sources, move))
        for shard in self._targets:
            shard.padding().zero_()
        for bucket in self.schedule.buckets:
            sent += sum(move.nbytes for move in bucket if move.source_rank == rank)
            for move, part in exchanged(bucket, sources):
                target = self._target(move)
                target.copy_(part.view(target.shape))
        torch.cuda.synchronize()
        of_ranks = all_gather_values((sent, time.perf_counter() - start))
        return ReshardingReport(
            bytes_sent=sum(bytes_sent for bytes_sent, _ in of_ranks),
            least_bytes=self.schedule.least_bytes,
            seconds=max(duration for _, duration in of_ranks),
        )

    def _target(self, move: Move) -> Tensor:
        return self._targets[move.target_slot].param.data.narrow(move.dim, move.target_start, move.length)


class WholeTensors:
    """All tensors of the whole model, put together from the parts of all ranks, as often as they are read.

    Each step of reading them is a collective: all ranks must read until the end. Ranks exchange which parts they have
    at the first time, and again only if the parts of a rank have changed.

    Args:
        shards: returns this rank's parts; called at the start of every reading.
        bucket_bytes: the size of a bucket; a larger tensor has one for itself.
    """

    def __init__(self, shards: Callable[[], Sequence[WeightShard]], bucket_bytes: int = 64 << 20) -> None:
        self._shards, self._bucket_bytes = shards, bucket_bytes
        self._planned_for: tuple[list[LocalTensor], Wanted] | None = None
        self._wanted: list[LocalTensor] = []
        self._buckets: tuple[tuple[Move, ...], ...] = ()

    @torch.no_grad()
    def buckets(self, memory: BucketMemory, wanted: Wanted = "all") -> Iterator[list[TensorInBucket]]:
        """Iterate over the buckets that this rank wants: the places of tensors in the memory that it was filled into.

        Args:
            memory: returns the memory of a bucket.
            wanted: the tensors that this rank gets: all of them, none, or each of which it is the first rank with a
                part.
        """
        shards = self._shards()
        mine = [shard.described() for shard in shards], wanted
        if any(all_gather_values(mine != self._planned_for)):
            self._make_schedule(mine)
        device, rank, sources = torch.device(torch.cuda.current_device()), dist.get_rank(), SliceReader(shards)
        for bucket in self._buckets:
            arriving = exchanged([move for move in bucket if move.source_rank != move.target_rank], sources)
            kept = [(move, _source(sources, move)) for move in bucket if move.source_rank == rank == move.target_rank]
            slots = sorted({move.target_slot for move in bucket if move.target_rank == rank})
            if slots:
                tensors = {slot: self._wanted[slot] for slot in slots}
                yield filled_bucket(tensors, [*kept, *arriving], memory, device)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over names and whole tensors, on every rank; no memory is shared with the model."""
        return tensors_in(self.buckets, self._shards()[0].param.device)

    def _make_schedule(self, mine: tuple[list[LocalTensor], Wanted]) -> None:
        of_ranks = all_gather_values((*mine, node_id()))
        sources = [tensors for tensors, _, _ in of_ranks]
        nodes = [node for _, _, node in of_ranks]
        first: dict[str, int] = {}
        for rank, tensors in enumerate(sources):
            for tensor in tensors:
                first.setdefault(tensor.name, rank)
        whole = whole_tensors(sources)
        targets = [
            [tensor for tensor in whole if wanted == "all" or (wanted == "first" and first[tensor.name] == rank)]
            for rank, (_, wanted, _) in enumerate(of_ranks)
        ]
        self._wanted, self._planned_for = targets[dist.get_rank()], mine
        self._buckets = ()
        if any(targets):
            self._buckets = plan_whole(
                sources, targets, self._bucket_bytes, lambda source, target: int(nodes[source] != nodes[target])
            )


def filled_bucket(
    tensors: Mapping[int, LocalTensor],
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


def _source(shards: SliceReader, move: Move) -> Tensor:
    return shards.read(move.source_slot, move.dim, move.source_start, move.length)


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
        source = _source(sources, move)
        part.view(source.shape).copy_(source)
    dist.all_to_all_single(incoming, outgoing, in_sizes, out_sizes)
    return list(zip(inbound, incoming.split([move.nbytes // dtype.itemsize for move in inbound]), strict=True))
