"""One rank's side of a transfer: fills buckets from its tensors, and its tensors or an engine from buckets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcontroller.errors import MControllerError
from workers.weights.resharding import BucketMemory, Wanted, filled_bucket
from workers.weights.resharding_schedule import LocalTensor, Move, TensorInBucket
from workers.weights.shards import SliceReader, WeightShard
from workers.weights.transfer.errors import PeerLost
from workers.weights.transfer.plan import PeerSlices, is_large
from workers.weights.transfer.transport import Deadline, RankTraffic, Receiver, Sender
from workers.weights.transfer.transports import TRANSPORTS

__all__ = ["RankSchedule", "TransferEndpoint", "TransferOutcome"]


class RankSchedule(NamedTuple):
    """The arguments with which a rank opens its side of a transfer.

    Attributes:
        transfer: the id of the transfer.
        transport: the name of the transport.
        sends: whether the rank belongs to the source.
        rank, size: its number among the ranks of both groups, and how many these are.
        buckets: what it sends or receives.
        timeout: seconds after which setting up a connection fails.
        direct: what it sends or receives outside of the buckets.
        hf_names: whether the tensors are named and divided as in a Hugging Face checkpoint.
        whole: the tensors that an engine gets, in the order of their slots; none without an engine.
    """

    transfer: str
    transport: str
    sends: bool
    rank: int
    size: int
    buckets: tuple[tuple[PeerSlices, ...], ...]
    timeout: float
    direct: tuple[Move, ...] = ()
    hf_names: bool = False
    whole: tuple[LocalTensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes that the rank sends or receives."""
        in_buckets = sum(slices.nbytes for bucket in self.buckets for slices in bucket)
        return in_buckets + sum(move.nbytes for move in self.direct)


class TransferOutcome(NamedTuple):
    """The result of one rank's part of a transfer.

    Attributes:
        nbytes: bytes that it sent or received.
        seconds: wall-clock time.
        buffer_bytes: memory that its side keeps in addition to the weights.
        version: the version of the policy that it sent; None for a rank that received.
        failure: what went wrong; "" if nothing.
        peer: the number of the rank that it waited for; None without a failure.
    """

    nbytes: int
    seconds: float
    buffer_bytes: int
    version: int | None
    failure: str = ""
    peer: int | None = None


class TransferEndpoint:
    """One rank's side of a transfer.

    Args:
        schedule: the rank's part of the schedule.
        shards: this rank's tensors, in the order of their slots; none if it serves an engine.
        device: of the tensors.
        address: of this node, for other nodes.

    Raises:
        ConfigError: there is no such transport.
    """

    def __init__(
        self, schedule: RankSchedule, shards: Sequence[WeightShard], device: torch.device, address: str
    ) -> None:
        self._schedule, self._shards, self._device = schedule, shards, device
        self._reader = SliceReader(shards)
        self._deadline = Deadline(schedule.timeout)
        transport = TRANSPORTS.get_or_raise(schedule.transport)
        self._uses_in_place = transport.uses_in_place
        traffic = RankTraffic(
            schedule.transfer,
            schedule.rank,
            schedule.size,
            address,
            schedule.buckets,
            device,
            schedule.timeout,
            schedule.direct,
            self._in_place,
        )
        self._end: Sender | Receiver = (transport.sender if schedule.sends else transport.receiver)(traffic)

    def listen(self) -> Any:
        """Return what other ranks need to reach this one."""
        return self._end.listen()

    def connect(self, addresses: Mapping[int, Any]) -> TransferOutcome:
        """Connect to the ranks that this one sends to or receives from; ``addresses`` are by rank."""
        return self._run(lambda: self._end.connect(addresses, self._deadline), self._schedule.timeout)

    @torch.no_grad()
    def send(self, timeout: float, version: int) -> TransferOutcome:
        """Send the current weights; the outcome carries ``version``."""
        return self._run(self._send, timeout)._replace(version=version)

    @torch.no_grad()
    def receive(self, timeout: float) -> TransferOutcome:
        """Replace the weights by the received ones."""
        return self._run(self._receive, timeout)

    def receive_whole(self, timeout: float, update: Callable[[], object]) -> TransferOutcome:
        """Run ``update``, which reads ``buckets`` on this rank."""
        return self._run(update, timeout)

    @torch.no_grad()
    def buckets(self, memory: BucketMemory, wanted: Wanted = "all") -> Iterator[list[TensorInBucket]]:
        """Iterate over the buckets of whole tensors that arrive for the engine of this rank."""
        self._end.start()
        for index, bucket in enumerate(self._schedule.buckets):
            slots = sorted({move.target_slot for slices in bucket for move in slices.moves})
            tensors = {slot: self._schedule.whole[slot] for slot in slots}
            yield filled_bucket(tensors, self._arriving(index), memory, self._device)
        self._end.flush(self._deadline)

    def close(self) -> None:
        """End the connections and free the buffers."""
        self._end.close()

    def _run(self, action: Callable[[], object], timeout: float) -> TransferOutcome:
        started, self._deadline = time.perf_counter(), Deadline(timeout)
        failure, peer = "", None
        try:
            action()
        except PeerLost as error:
            failure, peer = error.cause, error.peer
            self.close()  # peers that wait for this rank see it at once
        except MControllerError:
            self.close()
            raise
        seconds = time.perf_counter() - started
        return TransferOutcome(self._schedule.nbytes, seconds, self._end.buffer_bytes, None, failure, peer)

    def _send(self) -> None:
        sender: Any = self._end
        self._reader = SliceReader(self._shards)  # the weights have changed
        sender.start()
        for index, bucket in enumerate(self._schedule.buckets):
            buffer = sender.buffer(index, self._deadline)
            for slices in bucket:
                self._fill(buffer[slices.start : slices.start + slices.nbytes], slices.moves)
            if buffer.is_cuda:
                torch.cuda.current_stream().synchronize()
            sender.send(index, self._deadline)
        sender.flush(self._deadline)
        self._reader = SliceReader(self._shards)  # without the last merged tensor

    def _receive(self) -> None:
        for shard in self._shards:
            shard.padding().zero_()
        self._end.start()
        for index in range(len(self._schedule.buckets)):
            for move, values in self._arriving(index):
                if self._in_place(move) is None:
                    tensor = self._slice(move)
                    tensor.copy_(values.view(tensor.shape))
        self._end.flush(self._deadline)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _arriving(self, index: int) -> Iterator[tuple[Move, Tensor]]:
        """The slices of a bucket and their values, flat, each valid until the next one."""
        receiver: Any = self._end
        for slices, data in receiver.receive(index, self._deadline):
            yield from zip(slices.moves, _parts(data, slices.moves), strict=True)
            if data.is_cuda:
                torch.cuda.current_stream().synchronize()

    def _in_place(self, move: Move) -> Tensor | None:
        """Return the memory of a slice, uint8 ``[bytes]``, if it is large, contiguous and of the dtype that travels."""
        if not self._uses_in_place or not is_large(move) or self._schedule.whole:
            return None
        if self._schedule.sends and self._shards[move.source_slot].merging is not None:
            return None
        tensor = self._slice(move)  # now: weights that were offloaded have new memory
        suits = tensor.is_contiguous() and tensor.dtype == getattr(torch, move.dtype)
        return tensor.view(-1).view(torch.uint8) if suits else None

    def _slice(self, move: Move) -> Tensor:
        """Return the slice of this rank's tensor that a move sends, or fills."""
        if self._schedule.sends:
            return self._reader.read(move.source_slot, move.dim, move.source_start, move.length)
        return self._shards[move.target_slot].param.data.narrow(move.dim, move.target_start, move.length)

    def _fill(self, data: Tensor, moves: Sequence[Move]) -> None:
        """Copy slices of this rank's tensors into ``data``, converted to the dtype that travels."""
        for move, part in zip(moves, _parts(data, moves), strict=True):
            if self._in_place(move) is None:
                tensor = self._slice(move)
                part.view(tensor.shape).copy_(tensor)


def _parts(data: Tensor, moves: Sequence[Move]) -> tuple[Tensor, ...]:
    """Divide the bytes of slices, which have one dtype, into one tensor for each."""
    dtype = getattr(torch, moves[0].dtype)
    typed = data.view(dtype)
    ends = list(itertools.accumulate(move.nbytes // dtype.itemsize for move in moves))
    return tuple(typed[start:end] for start, end in zip([0, *ends], ends, strict=False))
