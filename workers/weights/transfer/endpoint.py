"""One rank's side of a transfer: fills buckets from its tensors, and its tensors or an engine from buckets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcontroller.errors import MControllerError
from workers.weights.moves import Move, TensorInBucket
from workers.weights.shards import SliceReader, WeightShard
from workers.weights.transfer.plan import RankSchedule
from workers.weights.transfer.transports import TRANSPORTS, Deadline, PeerLost
from workers.weights.whole_tensors import BucketMemory, Wanted, exchanged, filled_bucket


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
        self._end = TRANSPORTS.get_or_raise(schedule.transport)(schedule, device, address)

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
        self._reader = SliceReader(self._shards)  # the weights have changed
        for index, bucket in enumerate(self._schedule.buckets):
            buffer = self._end.buffer(index, self._deadline)
            relayed = self._exchange(index)
            for slices in bucket:
                self._fill(buffer[slices.start : slices.start + slices.nbytes], slices.moves, relayed)
            if buffer.is_cuda:
                torch.cuda.current_stream().synchronize()
            self._end.send(index, self._deadline)
        self._end.flush(self._deadline)
        self._reader = SliceReader(self._shards)  # without the last merged tensor

    def _exchange(self, index: int) -> Mapping[Move, Tensor]:
        """Exchange slices of a bucket with the other ranks that send, and return those that this one relays.

        The exchange is a collective of NCCL, which must not wait for a rank whose receiver is gone. So all ranks first
        report that they can send this bucket.
        """
        if not self._schedule.exchanges:
            return {}
        self._end.wait_for_senders(self._deadline)
        return dict(exchanged(self._schedule.exchanges[index], self._reader))

    def _receive(self) -> None:
        for shard in self._shards:
            shard.padding().zero_()
        for index in range(len(self._schedule.buckets)):
            for move, values in self._arriving(index):
                weights = self._shards[move.target_slot].param.data
                tensor = weights.narrow(move.dim, move.target_start, move.length)
                tensor.copy_(values.view(tensor.shape))
        self._end.flush(self._deadline)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _arriving(self, index: int) -> Iterator[tuple[Move, Tensor]]:
        """The slices of a bucket and their values, flat, each valid until the next one."""
        for slices, data in self._end.receive(index, self._deadline):
            yield from zip(slices.moves, _parts(data, slices.moves), strict=True)
            if data.is_cuda:
                torch.cuda.current_stream().synchronize()

    def _fill(self, data: Tensor, moves: Sequence[Move], relayed: Mapping[Move, Tensor]) -> None:
        """Copy slices of this rank's tensors, or relayed ones, into ``data``, converted to the dtype that travels."""
        rank = self._schedule.rank
        for move, part in zip(moves, _parts(data, moves), strict=True):
            if move.source_rank == rank:
                tensor = self._reader.read(move.source_slot, move.dim, move.source_start, move.length)
            else:
                tensor = relayed[move._replace(target_rank=rank)]
            part.view(tensor.shape).copy_(tensor)


def _parts(data: Tensor, moves: Sequence[Move]) -> tuple[Tensor, ...]:
    """Divide the bytes of slices, which have one dtype, into one tensor for each."""
    dtype = getattr(torch, moves[0].dtype)
    typed = data.view(dtype)
    ends = list(itertools.accumulate(move.nbytes // dtype.itemsize for move in moves))
    return tuple(typed[start:end] for start, end in zip([0, *ends], ends, strict=False))
