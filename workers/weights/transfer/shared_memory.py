"""Weights between processes of one node through memory that both have mapped, in two copies: in, and out.

A sender allocates two buckets that its receivers map: on a CPU an anonymous file of memory, which has no name, which
no other process can open, and which the kernel frees when the last process that has mapped it ends, however it ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from workers.weights.transfer.links import Link, Listener, ListenerAddress, connected
from workers.weights.transfer.plan import Holdings, Parcel
from workers.weights.transfer.transport import Deadline, RankTraffic, Transport

__all__ = ["TRANSPORT"]

_IN_FLIGHT = 2


class _Sender:
    """A sender's two buckets in shared memory, and a link to each receiver."""

    def __init__(self, traffic: RankTraffic) -> None:
        self._traffic = traffic
        self.buffer_bytes = _IN_FLIGHT * traffic.bucket_bytes
        self._listener = Listener()
        self._links: dict[int, Link] = {}
        self._unread: dict[int, list[int]] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)

    def listen(self) -> ListenerAddress:
        return self._listener.address

    def connect(self, addresses: Mapping[int, ListenerAddress], deadline: Deadline) -> None:
        self._links = self._listener.accept(self._traffic.peers, deadline)
        descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(self.buffer_bytes, 1))
            self._memory = _mapped(descriptor, self.buffer_bytes)
            for link in self._links.values():
                link.send(self.buffer_bytes.to_bytes(8), deadline, descriptors=[descriptor])
        finally:
            os.close(descriptor)

    def buffer(self, index: int, deadline: Deadline) -> Tensor:
        self._wait_until_read(index - _IN_FLIGHT, deadline)
        return self._memory[self._start(index) :][: self._traffic.bucket_bytes]

    def send(self, index: int, deadline: Deadline) -> None:
        self._unread[index] = [parcel.peer for parcel in self._traffic.buckets[index]]
        for parcel in self._traffic.buckets[index]:
            self._links[parcel.peer].send((self._start(index) + parcel.start).to_bytes(8), deadline)

    def flush(self, deadline: Deadline) -> None:
        for index in sorted(self._unread):
            self._wait_until_read(index, deadline)

    def close(self) -> None:
        self._listener.close()
        for link in self._links.values():
            link.close()
        self._links, self._unread = {}, {}
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _start(self, index: int) -> int:
        return index % _IN_FLIGHT * self._traffic.bucket_bytes

    def _wait_until_read(self, index: int, deadline: Deadline) -> None:
        for peer in self._unread.pop(index, ()):
            self._links[peer].receive(deadline)


class _Receiver:
    """A receiver's view of the buckets of its senders."""

    buffer_bytes = 0  # those of its senders are mapped

    def __init__(self, traffic: RankTraffic) -> None:
        self._traffic = traffic
        self._links: dict[int, Link] = {}
        self._memory: dict[int, Tensor] = {}

    def listen(self) -> None:
        """Return nothing: receivers connect to senders."""

    def connect(self, addresses: Mapping[int, ListenerAddress], deadline: Deadline) -> None:
        for peer in self._traffic.peers:
            link = self._links[peer] = connected(addresses[peer], self._traffic.rank, peer, deadline)
            size, (descriptor,) = link.receive(deadline, descriptors=1)
            self._memory[peer] = _mapped(descriptor, int.from_bytes(size))
            os.close(descriptor)

    def receive(self, index: int, deadline: Deadline) -> Iterator[tuple[Parcel, Tensor]]:
        for parcel in self._traffic.buckets[index]:
            link = self._links[parcel.peer]
            start = int.from_bytes(link.receive(deadline)[0])
            yield parcel, self._memory[parcel.peer][start : start + parcel.nbytes]
            link.send(b"", deadline)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links, self._memory = {}, {}


def _mapped(descriptor: int, size: int) -> Tensor:
    """Return the shared memory as uint8 ``[size]``; it is mapped as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(descriptor, max(size, 1)), dtype=torch.uint8)[:size]


def _why_not(sources: Sequence[Holdings], targets: Sequence[Holdings]) -> str:
    everyone = (*sources, *targets)
    nodes = sorted({each.node for each in everyone})
    if len(nodes) > 1:
        return f"the ranks are on {len(nodes)} nodes; expected one"
    if any(each.device != "cpu" for each in everyone):
        return "the weights are on GPUs: handles of CUDA memory (IPC) are not implemented"
    processes = {each.pid for each in everyone}
    return "the groups are in one process" if len(processes) < len(everyone) else ""


TRANSPORT = Transport(_Sender, _Receiver, _why_not)
