"""Weights through a process group of torch.distributed over the ranks of both groups: gloo on CPUs, NCCL on GPUs.

It has a separate store and separate connections: the default group of either side is not involved. Large slices that
are contiguous on both sides travel from the memory of one rank's weights to the other's, without a copy. They start
together, before the buckets: with two of them in flight, each wait would leave the connection idle.

Over NCCL, three things differ. A group's watchdog ends the process if a transfer takes longer than the group's timeout,
unless the group was created with another error handling. ``wait(timeout)`` counts from the start of the operation, not
from the call. And the first operation of a pair of ranks blocks until the other rank of the pair starts its own.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.weights.resharding_schedule import Move
from workers.weights.transfer.plan import PeerSlices, RankWeights
from workers.weights.transfer.transport import Deadline, PeerLost, Transport

_IN_FLIGHT = 2

_DIRECT = -1
"""The key of the slices that travel outside of the buckets, among the buckets."""


_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NO_HANDLING = "0"
"""Leave errors to the program, which aborts the group itself: ``ErrorHandlingMode`` of torch's ProcessGroupNCCL."""

_POLL_S = 0.001


class ProcessGroup(Transport):
    """A rank of the process group, with two buckets; rank 0, of the source, has the store."""

    sends_directly = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffer_bytes = _IN_FLIGHT * self.schedule.bucket_bytes
        self._store: dist.TCPStore | None = None
        self._group: Any = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._works: dict[int, list[tuple[int, Any]]] = {}
        """By bucket, the peers and the transfers to or from them that were not waited for."""

    @staticmethod
    def why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
        """Return why not: ranks share a process or a GPU, or one group is on CPUs."""
        everyone = (*sources, *targets)
        if len({(each.node, each.pid) for each in everyone}) < len(everyone):
            return "ranks of the groups share a process; a process is one rank of a process group"
        devices = [each.device for each in everyone]
        kinds = {device == "cpu" for device in devices}
        if len(kinds) > 1:
            return "one group is on CPUs and the other on GPUs"
        shared = sorted({device for device in devices if device != "cpu" and devices.count(device) > 1})
        return f"several ranks are on the GPU {shared[0]}: NCCL cannot connect them" if shared else ""

    def listen(self) -> tuple[str, int] | None:
        """Return the host and the port of the store, on rank 0."""
        if self.schedule.rank != 0:
            return None
        duration = datetime.timedelta(seconds=self.schedule.timeout)
        self._store = dist.TCPStore(self.address, 0, is_master=True, timeout=duration, wait_for_workers=False)
        return self.address, self._store.port

    def connect(self, addresses: Mapping[int, Any], deadline: Deadline) -> None:
        """Create the process group; all ranks call this at the same time."""
        duration = datetime.timedelta(seconds=deadline.left(0))
        try:
            host, port = addresses[0]
            store = self._store or dist.TCPStore(host, port, is_master=False, timeout=duration)
            self._group = _new_group(store, self.schedule.rank, self.schedule.size, duration, self.device)
        except RuntimeError as error:
            raise PeerLost(f"the process group of the transfer: {error}", peer=0, cause=str(error)) from error
        if self._on_gpu:
            self._connect_pairs(store, deadline)
        self._memory = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self.device)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _peer(self, move: Move) -> int:
        return move.target_rank if self.schedule.sends else move.source_rank

    def _started(self, memory: Tensor, peer: int) -> tuple[int, Any]:
        """Start to send or receive; return the peer and what can be waited for."""
        operation = self._group.send if self.schedule.sends else self._group.recv
        with _lost(peer):  # the connection may have ended already
            return peer, operation([memory], peer, 0)

    def _connect_pairs(self, store: dist.Store, deadline: Deadline) -> None:
        """Exchange one byte with every peer, so that no later operation is the first of its pair.

        All ranks do this in the order of (rank that sends, rank that receives), so no ranks wait in a circle. Nothing
        starts before all peers are there: NCCL waits without a deadline for a rank that never comes.
        """
        peers = sorted({*self.schedule.peers, *map(self._peer, self.schedule.direct)})
        store.set(f"is there: {self.schedule.rank}", "")
        for peer in peers:
            with _lost(peer):
                store.wait([f"is there: {peer}"], datetime.timedelta(seconds=deadline.left(peer)))
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for peer in peers:
            self._wait(*self._started(byte, peer), deadline)

    def start(self) -> None:
        """Start to send or receive the slices that travel outside of the buckets."""
        if self.direct_memory is not None:
            memory = self.direct_memory
            self._works[_DIRECT] = [self._started(memory(move), self._peer(move)) for move in self.schedule.direct]

    def buffer(self, index: int, deadline: Deadline) -> Tensor:
        """Return the memory of a bucket, after the one before in it was sent."""
        self._wait_for(index - _IN_FLIGHT, deadline)
        return self._slot(index)

    def send(self, index: int, deadline: Deadline) -> None:
        """Start to send the bucket."""
        self._start_bucket(index)

    def receive(self, index: int, deadline: Deadline) -> Iterator[tuple[PeerSlices, Tensor]]:
        """Start to receive this bucket and the next one, and iterate over the slices of this one."""
        for ahead in range(index, min(index + _IN_FLIGHT, len(self.schedule.buckets))):
            if ahead not in self._works:
                self._start_bucket(ahead)
        for slices, (peer, work) in zip(self.schedule.buckets[index], self._works.pop(index), strict=True):
            self._wait(peer, work, deadline)
            yield slices, self._part(index, slices)

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
        size = self.schedule.bucket_bytes
        return self._memory[index % _IN_FLIGHT * size :][:size]

    def _part(self, index: int, slices: PeerSlices) -> Tensor:
        return self._slot(index)[slices.start : slices.start + slices.nbytes]

    def _start_bucket(self, index: int) -> None:
        buckets = self.schedule.buckets
        self._works[index] = [self._started(self._part(index, slices), slices.peer) for slices in buckets[index]]

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


@contextlib.contextmanager
def _lost(peer: int) -> Iterator[None]:
    """Raise PeerLost for an error of the process group."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost.of(peer, str(error)) from error


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
