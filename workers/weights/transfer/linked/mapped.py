"""Buckets in memory that a sender and its receivers have mapped: two copies, in and out.

A sender allocates two buckets, and each of its receivers maps both when it connects. What memory that is, and how it is
handed to another process, is up to the subclasses: ``shared_memory`` on CPUs, ``cuda_ipc`` on GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.weights.transfer.linked.ends import LinkedReceiver, LinkedSender
from workers.weights.transfer.linked.links import Link
from workers.weights.transfer.plan import PeerSlices
from workers.weights.transfer.transport import Deadline, RankTraffic

if TYPE_CHECKING:
    from mcontroller.channel.address import Address

__all__ = ["MappedReceiver", "MappedSender"]

_IN_FLIGHT = 2


class MappedSender(LinkedSender):
    """A sender's two buckets in memory that receivers map. Subclasses define ``share``.

    Args:
        traffic: what it sends.
    """

    def __init__(self, traffic: RankTraffic) -> None:
        super().__init__(traffic)
        self.buffer_bytes = _IN_FLIGHT * traffic.bucket_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)

    def share(self, links: Mapping[int, Link], deadline: Deadline) -> Tensor:
        """Allocate ``buffer_bytes``, let the receivers at these links map them, and return them, uint8 ``[bytes]``."""
        raise NotImplementedError

    def connect(self, addresses: Mapping[int, Address], deadline: Deadline) -> None:
        """Share the buckets with the receivers."""
        super().connect(addresses, deadline)
        self._memory = self.share(self.links, deadline)

    def buffer(self, index: int, deadline: Deadline) -> Tensor:
        """Return the memory of a bucket, after the one before in it was read."""
        self.wait_until_read(index - _IN_FLIGHT, deadline)
        return self._memory[self._start(index) :][: self.traffic.bucket_bytes]

    def send(self, index: int, deadline: Deadline) -> None:
        """Send each receiver the position of its slices."""
        for slices in self.traffic.buckets[index]:
            self.send_message(index, slices, self._start(index) + slices.start)

    def close(self) -> None:
        """Close the links and drop the memory."""
        super().close()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _start(self, index: int) -> int:
        return index % _IN_FLIGHT * self.traffic.bucket_bytes


class MappedReceiver(LinkedReceiver):
    """A receiver's view of the buckets of its senders. Subclasses define ``map_memory``.

    Args:
        traffic: what it receives.
    """

    def __init__(self, traffic: RankTraffic) -> None:
        super().__init__(traffic)
        self._memory: dict[int, Tensor] = {}

    def map_memory(self, link: Link, deadline: Deadline) -> Tensor:
        """Return the memory that the sender at the link shares, uint8 ``[bytes]``; mapped as long as it lives."""
        raise NotImplementedError

    def connect(self, addresses: Mapping[int, Address], deadline: Deadline) -> None:
        """Connect to the senders, and map their buckets."""
        super().connect(addresses, deadline)
        self._memory = {peer: self.map_memory(link, deadline) for peer, link in self.links.items()}

    def read(self, slices: PeerSlices, deadline: Deadline) -> Tensor:
        """Return the part of the sender's bucket that its message names."""
        start: int = self.links[slices.peer].receive(deadline)
        return self._memory[slices.peer][start : start + slices.nbytes]

    def close(self) -> None:
        """Drop the memory of the senders, and close the links."""
        self._memory = {}
        super().close()
