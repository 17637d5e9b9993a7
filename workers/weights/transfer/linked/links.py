"""Links between two ranks for the small messages around a bucket: it is ready, it was read.

Each rank has a mailbox, which its peers read by queries, over the transport of calls: who has the rank's address has
its keys, and nobody else is answered. A peer that ends is noticed at once; one that is silent until the deadline hangs.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from typing import TYPE_CHECKING, Any

from workers.weights.transfer.errors import PeerLost
from workers.weights.transfer.transport import Deadline

if TYPE_CHECKING:  # workers without a group need no ZeroMQ, which these modules load
    from mcontroller.channel.address import Address
    from mcontroller.channel.server import Reply

__all__ = ["Link", "Mailbox"]


class Mailbox:
    """The messages of one rank that its peers have not read yet.

    Args:
        host: the address of this node, as other nodes know it.
    """

    def __init__(self, host: str) -> None:
        from mcontroller.channel.address import ChannelKeys
        from mcontroller.channel.server import QueryServer

        self._folder = tempfile.mkdtemp(prefix="weights-")
        self._lock = threading.Lock()
        self._messages: dict[tuple[int, int], Any] = {}
        self._readers: dict[tuple[int, int], Reply] = {}
        self._server = QueryServer(host, ChannelKeys.generate(), folder=self._folder)
        self._server.start({"take": self._take})

    @property
    def address(self) -> Address:
        """Where the peers read, and the keys with which they can."""
        return self._server.address

    def put(self, reader: int, number: int, message: Any) -> None:
        """Keep a message until its reader has taken it: the rank, and the number of the message between both ranks."""
        with self._lock:
            reply = self._readers.pop((reader, number), None)
            if reply is None:
                self._messages[reader, number] = message
        if reply is not None:
            reply(message)

    def _take(self, reply: Reply, reader: int, number: int) -> None:
        with self._lock:
            found = (reader, number) in self._messages
            message = self._messages.pop((reader, number), None)
            if not found:
                self._readers[reader, number] = reply
        if found:
            reply(message)

    def close(self) -> None:
        """Stop being read, which peers that wait notice at once."""
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Link:
    """The messages from and to one rank of the other group, each way in order.

    Args:
        mailbox: this rank's.
        rank: this rank.
        peer: the other rank.
        address: that of its mailbox.
    """

    def __init__(self, mailbox: Mailbox, rank: int, peer: int, address: Address) -> None:
        self.peer = peer
        self._mailbox, self._rank, self._address = mailbox, rank, address
        self._sent = self._received = 0

    def send(self, message: Any) -> None:
        """Send a value that can be pickled. Does not wait."""
        self._mailbox.put(self.peer, self._sent, message)
        self._sent += 1

    def receive(self, deadline: Deadline) -> Any:
        """Return the next message.

        Raises:
            PeerLost: the process of the peer ended, it closed the transfer, or there was no message in time.
        """
        from mcontroller.channel.queries import ask_each

        query = ("take", (self._rank, self._received))
        [answer], late = ask_each([self._address], [query], deadline.left(self.peer))
        if answer is None:
            ended = "connection lost: its process ended, or it closed the transfer"
            cause = f"no answer within {deadline.seconds:g} s" if late else ended
            raise PeerLost(f"rank {self.peer} of the transfer: {cause}", peer=self.peer, cause=cause)
        self._received += 1
        return answer[0]
