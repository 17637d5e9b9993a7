"""What transports have in common that send a small message over a link for the slices of each bucket.

For the slices of a bucket that go to one receiver, the sender sends it a message, from which it gets the bytes; it
answers when it has read them. A sender fills a bucket again when all receivers have read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from workers.weights.transfer.linked.links import Link, Mailbox
from workers.weights.transfer.plan import PeerSlices
from workers.weights.transfer.transport import Deadline, RankTraffic

if TYPE_CHECKING:
    from mcontroller.channel.address import Address

__all__ = ["LinkedReceiver", "LinkedSender"]


class _LinkedEnd:
    """A rank's mailbox, and a link to each rank that it exchanges weights with."""

    def __init__(self, traffic: RankTraffic) -> None:
        self.traffic = traffic
        self.links: dict[int, Link] = {}
        self._mailbox = Mailbox(traffic.address)

    def listen(self) -> Address:
        """Return the address that peers read messages from."""
        return self._mailbox.address

    def connect(self, addresses: Mapping[int, Address], deadline: Deadline) -> None:
        """Make the links; a peer that cannot be reached is noticed when it is read from."""
        own, rank = self._mailbox, self.traffic.rank
        self.links = {peer: Link(own, rank, peer, addresses[peer]) for peer in self.traffic.peers}

    def start(self) -> None:
        """Do nothing: everything travels in buckets."""

    def close(self) -> None:
        """Close the mailbox, which the peers notice at once."""
        self._mailbox.close()
        self.links = {}


class LinkedSender(_LinkedEnd):
    """The end of a rank that sends: a link to each receiver, and the buckets that were not read.

    Args:
        traffic: what it sends.
    """

    def __init__(self, traffic: RankTraffic) -> None:
        super().__init__(traffic)
        self._unread: dict[int, list[int]] = {}

    def send_message(self, index: int, slices: PeerSlices, message: Any) -> None:
        """Send the message of the slices of this bucket to their receiver, who has not read the bytes yet."""
        self._unread.setdefault(index, []).append(slices.peer)
        self.links[slices.peer].send(message)

    def wait_until_read(self, index: int, deadline: Deadline) -> None:
        """Wait until all receivers have read a bucket; do nothing if that is known, or nothing was sent."""
        for peer in self._unread.pop(index, ()):
            self.links[peer].receive(deadline)

    def flush(self, deadline: Deadline) -> None:
        """Wait until all buckets were read."""
        for index in sorted(self._unread):
            self.wait_until_read(index, deadline)

    def close(self) -> None:
        """Close the mailbox, which the receivers notice at once."""
        super().close()
        self._unread = {}


class LinkedReceiver(_LinkedEnd):
    """The end of a rank that receives: a link to each sender. Subclasses define ``read``.

    Args:
        traffic: what it receives.
    """

    buffer_bytes = 0  # it reads the memory of its senders

    def read(self, slices: PeerSlices, deadline: Deadline) -> Tensor:
        """Return the bytes of the slices, uint8 ``[bytes]``, after their message was received.

        Raises:
            PeerLost: the sender has not sent in time, or its process ended.
        """
        raise NotImplementedError

    def receive(self, index: int, deadline: Deadline) -> Iterator[tuple[PeerSlices, Tensor]]:
        """Iterate over the slices of a bucket with their bytes; answer when each was read."""
        for slices in self.traffic.buckets[index]:
            yield slices, self.read(slices, deadline)
            self.links[slices.peer].send(None)

    def flush(self, deadline: Deadline) -> None:
        """Do nothing: what was received is there."""
