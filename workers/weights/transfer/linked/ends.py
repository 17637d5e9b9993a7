"""What transports have in common that send a small message over a link for the slices of each bucket.

A receiver connects to its senders. For those of a bucket the sender sends a message, from which the receiver gets the
bytes; the receiver answers when it has read them. A sender fills a bucket again when all receivers have read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from workers.weights.transfer.linked.links import Link, Listener, ListenerAddress, connected
from workers.weights.transfer.plan import PeerSlices
from workers.weights.transfer.transport import Deadline, RankTraffic

__all__ = ["LinkedReceiver", "LinkedSender"]


class LinkedSender:
    """The end of a rank that sends: a link to each receiver, and the buckets that were not read.

    Args:
        traffic: what it sends.
        host: the address of this node for other nodes; None if all receivers are on it.
    """

    def __init__(self, traffic: RankTraffic, host: str | None) -> None:
        self.traffic = traffic
        self.links: dict[int, Link] = {}
        self._listener = Listener(host)
        self._unread: dict[int, list[int]] = {}

    def listen(self) -> ListenerAddress:
        """Return the address that receivers connect to."""
        return self._listener.address

    def connect(self, addresses: Mapping[int, Any], deadline: Deadline) -> None:
        """Wait for the connections of the receivers."""
        self.links = self._listener.accept(self.traffic.peers, deadline)

    def start(self) -> None:
        """Do nothing: everything travels in buckets."""

    def send_message(self, index: int, slices: PeerSlices, message: bytes, deadline: Deadline) -> None:
        """Send the message of the slices of this bucket to their receiver, who has not read the bytes yet."""
        self._unread.setdefault(index, []).append(slices.peer)
        self.links[slices.peer].send(message, deadline)

    def wait_until_read(self, index: int, deadline: Deadline) -> None:
        """Wait until all receivers have read a bucket; do nothing if that is known, or nothing was sent."""
        for peer in self._unread.pop(index, ()):
            self.links[peer].receive(deadline)

    def flush(self, deadline: Deadline) -> None:
        """Wait until all buckets were read."""
        for index in sorted(self._unread):
            self.wait_until_read(index, deadline)

    def close(self) -> None:
        """Close the links, which the receivers notice at once."""
        self._listener.close()
        for link in self.links.values():
            link.close()
        self.links, self._unread = {}, {}


class LinkedReceiver:
    """The end of a rank that receives: a link to each sender. Subclasses define ``read``.

    Args:
        traffic: what it receives.
    """

    buffer_bytes = 0  # it reads the memory of its senders

    def __init__(self, traffic: RankTraffic) -> None:
        self.traffic = traffic
        self.links: dict[int, Link] = {}

    def read(self, slices: PeerSlices, deadline: Deadline) -> Tensor:
        """Return the bytes of the slices, uint8 ``[bytes]``, after their message was received.

        Raises:
            PeerLost: the sender has not sent in time, or its process ended.
        """
        raise NotImplementedError

    def listen(self) -> None:
        """Return nothing: receivers connect to senders."""

    def connect(self, addresses: Mapping[int, ListenerAddress], deadline: Deadline) -> None:
        """Connect to the senders."""
        for peer in self.traffic.peers:
            self.links[peer] = connected(addresses[peer], self.traffic.rank, peer, deadline)

    def start(self) -> None:
        """Do nothing: everything travels in buckets."""

    def receive(self, index: int, deadline: Deadline) -> Iterator[tuple[PeerSlices, Tensor]]:
        """Iterate over the slices of a bucket with their bytes; answer when each was read."""
        for slices in self.traffic.buckets[index]:
            yield slices, self.read(slices, deadline)
            self.links[slices.peer].send(b"", deadline)

    def flush(self, deadline: Deadline) -> None:
        """Do nothing: what was received is there."""

    def close(self) -> None:
        """Close the links, which the senders notice at once."""
        for link in self.links.values():
            link.close()
        self.links = {}
