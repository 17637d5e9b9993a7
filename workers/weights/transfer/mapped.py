"""Buckets in memory that a sender and its receivers have mapped: two copies, in and out, between ranks of one node.

A sender allocates two buckets, and each of its receivers maps both when it connects. For the slices of a bucket that go
to one receiver, the sender sends it their position in this memory; the receiver answers when it has read them. A sender
fills a bucket again when all receivers have read it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workers.weights.transfer.mailbox import Mailbox
from workers.weights.transfer.plan import PeerSlices, RankWeights
from workers.weights.transfer.transport import Deadline, PeerLost, Transport

if TYPE_CHECKING:
    from mcontroller.channel.address import Address

_IN_FLIGHT = 2


class Mapped(Transport):
    """A rank's mailbox, its buckets, and the buckets of its senders. Subclasses define how memory is shared.

    Attributes:
        mailbox: carries the messages to and from the peers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffer_bytes = _IN_FLIGHT * self.schedule.bucket_bytes if self.schedule.sends else 0
        self.mailbox = Mailbox(self.schedule.rank, self.address)
        self._memory: dict[int, Tensor] = {}
        """By rank, this one or a sender, the memory that it shares."""
        self._unread: dict[int, list[int]] = {}
        """By bucket, the receivers that have not read it."""

    def share(self, deadline: Deadline) -> Tensor:
        """Allocate ``buffer_bytes``, let the receivers map them, and return them, uint8 ``[bytes]``."""
        raise NotImplementedError

    def map_memory(self, peer: int, message: Any) -> Tensor:
        """Return the memory that a sender shares by this message, uint8 ``[bytes]``; mapped as long as it lives."""
        raise NotImplementedError

    def listen(self) -> Address:
        """Return the address that peers read messages from."""
        return self.mailbox.address

    def connect(self, addresses: Mapping[int, Address], deadline: Deadline) -> None:
        """Share the buckets with the receivers, or map those of the senders."""
        self.mailbox.peers = addresses
        if self.schedule.sends:
            self._memory = {self.schedule.rank: self.share(deadline)}
        else:
            receive = self.mailbox.receive
            self._memory = {peer: self.map_memory(peer, receive(peer, deadline)) for peer in self.schedule.peers}

    def buffer(self, index: int, deadline: Deadline) -> Tensor:
        """Return the memory of a bucket, after the one before in it was read."""
        self._wait_until_read(index - _IN_FLIGHT, deadline)
        return self._memory[self.schedule.rank][self._start(index) :][: self.schedule.bucket_bytes]

    def send(self, index: int, deadline: Deadline) -> None:
        """Send each receiver the position of its slices."""
        for slices in self.schedule.buckets[index]:
            self._unread.setdefault(index, []).append(slices.peer)
            self.mailbox.send(slices.peer, self._start(index) + slices.start)

    def _start(self, index: int) -> int:
        return index % _IN_FLIGHT * self.schedule.bucket_bytes

    def _wait_until_read(self, index: int, deadline: Deadline) -> None:
        for peer in self._unread.pop(index, ()):
            self.mailbox.receive(peer, deadline)

    def receive(self, index: int, deadline: Deadline) -> Iterator[tuple[PeerSlices, Tensor]]:
        """Iterate over the slices with their memory in the senders' buckets; answer when each was read."""
        for slices in self.schedule.buckets[index]:
            start: int = self.mailbox.receive(slices.peer, deadline)
            yield slices, self._memory[slices.peer][start : start + slices.nbytes]
            self.mailbox.send(slices.peer, None)

    def flush(self, deadline: Deadline) -> None:
        """Wait until all buckets were read."""
        for index in sorted(self._unread):
            self._wait_until_read(index, deadline)

    def close(self) -> None:
        """Close the mailbox, which the peers notice at once, and drop the memory."""
        self.mailbox.close()
        self._memory, self._unread = {}, {}


class SharedMemory(Mapped):
    """Memory of an anonymous file, between processes on CPUs.

    Only processes of this user can open it, and the kernel frees it when the last process that has mapped it ends,
    however it ends.
    """

    @staticmethod
    def why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
        """Return why not: several nodes, GPUs, or one process."""
        everyone = (*sources, *targets)
        nodes = sorted({each.node for each in everyone})
        if len(nodes) > 1:
            return f"the ranks are on {len(nodes)} nodes; expected one"
        if any(each.device != "cpu" for each in everyone):
            return "the weights are on GPUs; expected CPUs (cuda_ipc is for GPUs)"
        processes = {each.pid for each in everyone}
        return "the groups are in one process" if len(processes) < len(everyone) else ""

    def share(self, deadline: Deadline) -> Tensor:
        """Create the file, and let every receiver open it."""
        descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(self.buffer_bytes, 1))
            for peer in self.schedule.peers:
                self.mailbox.send(peer, (f"/proc/{os.getpid()}/fd/{descriptor}", self.buffer_bytes))
            for peer in self.schedule.peers:
                self.mailbox.receive(peer, deadline)
            return _mapped(descriptor, self.buffer_bytes)
        finally:
            os.close(descriptor)

    def map_memory(self, peer: int, message: Any) -> Tensor:
        """Open the file of a sender and map it."""
        path, size = message
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise PeerLost.of(peer, f"its memory cannot be opened: {error}") from error
        try:
            memory = _mapped(descriptor, size)
        finally:
            os.close(descriptor)
        self.mailbox.send(peer, None)
        return memory


def _mapped(descriptor: int, size: int) -> Tensor:
    """Return the shared memory as uint8 ``[size]``; it is mapped as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(descriptor, max(size, 1)), dtype=torch.uint8)[:size]
