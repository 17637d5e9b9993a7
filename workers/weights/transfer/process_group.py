"""Weights through a process group of torch.distributed over the ranks of both groups: gloo on CPUs, NCCL on GPUs.

It has a separate store and separate connections: the default group of either side is not involved. Large slices that
are contiguous travel from the memory of one rank's weights to the other's, without a copy. All slices that are
contiguous on both sides start together, before the buckets: with two of them in flight, each wait would leave the
connection idle.

Over NCCL, three things differ. A group's watchdog ends the process if a transfer takes longer than the group's timeout,
unless the group was created with another error handling. ``wait(timeout)`` counts from the start of the operation, not
from the call. And the first operation of a pair of ranks blocks until the other rank of the pair starts its own.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcontroller.errors import DataError
from workers.weights.resharding_schedule import Move
from workers.weights.transfer.errors import PeerLost
from workers.weights.transfer.plan import PeerSlices, RankWeights
from workers.weights.transfer.transport import Deadline, RankTraffic, Transport

__all__ = ["TRANSPORT"]

_IN_FLIGHT = 2

_DIRECT = -1
"""The key of the slices that travel outside of the buckets, among the buckets."""


_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NO_HANDLING = "0"
"""Leave errors to the program, which aborts the group itself: ``ErrorHandlingMode`` of torch's ProcessGroupNCCL."""

_POLL_S = 0.001

_Operation = Callable[[list[Tensor], int, int], Any]
"""``send`` or ``recv`` of a process group: from tensors, the peer and a tag to what can be waited for."""


class _End:
    """A rank of the process group, with two buckets; rank 0, of the source, has the store."""

    def __init__(self, traffic: RankTraffic) -> None:
        self._traffic = traffic
        self.buffer_bytes = _IN_FLIGHT * traffic.bucket_bytes
        self._store: dist.TCPStore | None = None
        self._group: Any = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._works: dict[int, list[tuple[int, Any]]] = {}
        """By bucket, the peers and the transfers to or from them that were not waited for."""

    def listen(self) -> tuple[str, int] | None:
        """Return the host and the port of the store, on rank 0."""
        if self._traffic.rank != 0:
            return None
        duration = datetime.timedelta(seconds=self._traffic.timeout)
        address = self._traffic.address
        self._store = dist.TCPStore(address, 0, is_master=True, timeout=duration, wait_for_workers=False)
        return address, self._store.port

    def connect(self, addresses: Mapping[int, Any], deadline: Deadline) -> None:
        """Create the process group; all ranks call this at the same time."""
        duration = datetime.timedelta(seconds=deadline.left(0))
        rank, size = self._traffic.rank, self._traffic.size
        try:
            host, port = addresses[0]
            store = self._store or dist.TCPStore(host, port, is_master=False, timeout=duration)
            self._group = _new_group(store, rank, size, duration, self._traffic.device)
        except RuntimeError as error:
            raise PeerLost(f"the process group of the transfer: {error}", peer=0, cause=str(error)) from error
        if self._on_gpu:
            self._connect_pairs(store, deadline)
        self._memory = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self._traffic.device)

    @property
    def _on_gpu(self) -> bool:
        return self._traffic.device.type == "cuda"

    def _direct_peer(self, move: Move) -> int:
        raise NotImplementedError

    def _operation(self) -> _Operation:
        """Return what this end does with the group: send, or receive."""
        raise NotImplementedError

    def _connect_pairs(self, store: dist.Store, deadline: Deadline) -> None:
        """Exchange one byte with every peer, so that no later operation is the first of its pair.

        All ranks do this in the order of (rank that sends, rank that receives), so no ranks wait in a circle. Nothing
        starts before all peers are there: NCCL waits without a deadline for a rank that never comes.
        """
        peers = sorted({*self._traffic.peers, *map(self._direct_peer, self._traffic.direct)})
        store.set(f"is there: {self._traffic.rank}", "")
        for peer in peers:
            with _lost(peer):
                store.wait([f"is there: {peer}"], datetime.timedelta(seconds=deadline.left(peer)))
        byte = torch.zeros(1, dtype=torch.uint8, device=self._traffic.device)
        for peer in peers:
            self._wait(*_started(self._operation(), byte, peer), deadline)

    def flush(self, deadline: Deadline) -> None:
        """Wait for everything that was started."""
        for index in sorted(self._works):
            self._wait_for(index, deadline)

    def close(self) -> None:
        """Drop the process group; transfers that others wait for fail."""
        if self._group is not None:
            self._group.abort()
        self._group = self._store = None
        self._works = {}
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _slot(self, index: int) -> Tensor:
        size = self._traffic.bucket_bytes
        return self._memory[index % _IN_FLIGHT * size :][:size]

    def _part(self, index: int, slices: PeerSlices) -> Tensor:
        return self._slot(index)[slices.start : slices.start + slices.nbytes]

    def _messages(self, index: int, slices: PeerSlices) -> list[Tensor]:
        """Return the memory of each message of the slices: the weights', or a part of the bucket."""
        part = self._part(index, slices)
        memory: list[Tensor] = []
        for message in slices.messages():
            in_place = None if message.move is None else self._traffic.in_place(message.move)
            memory.append(part[message.start :][: message.nbytes] if in_place is None else in_place)
        return memory

    def start(self) -> None:
        """Start to send or receive the slices that travel outside of the buckets."""
        self._works[_DIRECT] = [
            _started(self._operation(), self._memory_of(move), self._direct_peer(move)) for move in self._traffic.direct
        ]

    def _memory_of(self, move: Move) -> Tensor:
        memory = self._traffic.in_place(move)
        if memory is None:
            raise DataError(
                f"a weight that was contiguous {move.dtype} when the transfer was opened is not any more: open a new "
                "WeightTransfer",
                dtype=move.dtype,
            )
        return memory

    def _wait_for(self, index: int, deadline: Deadline) -> None:
        for peer, work in self._works.pop(index, ()):
            self._wait(peer, work, deadline)

    def _wait(self, peer: int, work: Any, deadline: Deadline) -> None:
        left = datetime.timedelta(seconds=deadline.left(peer))
        with _lost(peer):
            while self._on_gpu and not work.is_completed():
                deadline.left(peer)
                time.sleep(_POLL_S)
            work.wait(*([] if self._on_gpu else [left]))


class _Sender(_End):
    def _direct_peer(self, move: Move) -> int:
        return move.target_rank

    def _operation(self) -> _Operation:
        return self._group.send

    def buffer(self, index: int, deadline: Deadline) -> Tensor:
        self._wait_for(index - _IN_FLIGHT, deadline)
        return self._slot(index)

    def send(self, index: int, deadline: Deadline) -> None:
        for slices in self._traffic.buckets[index]:
            for memory in self._messages(index, slices):
                self._works.setdefault(index, []).append(_started(self._operation(), memory, slices.peer))


class _Receiver(_End):
    def _direct_peer(self, move: Move) -> int:
        return move.source_rank

    def _operation(self) -> _Operation:
        return self._group.recv

    def receive(self, index: int, deadline: Deadline) -> Iterator[tuple[PeerSlices, Tensor]]:
        for ahead in range(index, min(index + _IN_FLIGHT, len(self._traffic.buckets))):
            if ahead not in self._works:
                self._works[ahead] = [
                    _started(self._operation(), memory, slices.peer)
                    for slices in self._traffic.buckets[ahead]
                    for memory in self._messages(ahead, slices)
                ]
        works = iter(self._works.pop(index))
        for slices in self._traffic.buckets[index]:
            for peer, work in itertools.islice(works, len(slices.messages())):
                self._wait(peer, work, deadline)
            yield slices, self._part(index, slices)


@contextlib.contextmanager
def _lost(peer: int) -> Iterator[None]:
    """Raise PeerLost for an error of the process group."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"rank {peer} of the transfer: {error}", peer=peer, cause=str(error)) from error


def _started(operation: _Operation, memory: Tensor, peer: int) -> tuple[int, Any]:
    """Start to send or receive; return the peer and what can be waited for."""
    with _lost(peer):  # the connection may have ended already
        return peer, operation([memory], peer, 0)


def _new_group(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, device: torch.device) -> Any:
    prefixed = dist.PrefixStore("weights", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _error_handling(_NO_HANDLING):
            return dist.ProcessGroupNCCL(prefixed, rank, size, options)
    return dist.ProcessGroupGloo(prefixed, rank, size, timeout)


@contextlib.contextmanager
def _error_handling(mode: str) -> Iterator[None]:
    """Set how the NCCL groups that the block creates handle errors; torch reads it from the environment only."""
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = mode
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before


def _why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
    everyone = (*sources, *targets)
    if len({(each.node, each.pid) for each in everyone}) < len(everyone):
        return "ranks of the groups share a process; a process is one rank of a process group"
    devices = [each.device for each in everyone]
    kinds = {device == "cpu" for device in devices}
    if len(kinds) > 1:
        return "one group is on CPUs and the other on GPUs"
    shared = sorted({device for device in devices if device != "cpu" and devices.count(device) > 1})
    return f"several ranks are on the GPU {shared[0]}: NCCL cannot connect them" if shared else ""


TRANSPORT = Transport(_Sender, _Receiver, _why_not, uses_in_place=True)
