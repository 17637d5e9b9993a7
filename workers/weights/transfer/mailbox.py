"""Small messages between ranks, around a bucket: it is ready, it was read.

Each rank has a mailbox, which its peers read by queries, over the transport of calls: who has the rank's address has
its keys, and nobody else is answered. A peer that ends is noticed at once; one that is silent until the deadline hangs.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workers.weights.transfer.transport import Deadline, PeerLost

if TYPE_CHECKING:  # workers without a group need no ZeroMQ, which these modules load
    from mcontroller.channel.address import Address
    from mcontroller.channel.server import Reply


class Mailbox:
    """The messages of one rank that its peers have not read yet, and what it reads from theirs, in order.

    Args:
        rank: this rank.
        host: the address of this node, as other nodes know it.

    Attributes:
        peers: the addresses of the other ranks' mailboxes.
    """

    def __init__(self, rank: int, host: str) -> None:
        from mcontroller.channel.address import ChannelKeys
        from mcontroller.channel.server import QueryServer

        self._rank = rank
        self.peers: Mapping[int, Address] = {}
        self._sent, self._received = Counter[int](), Counter[int]()
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

    def send(self, peer: int, message: Any) -> None:
        """Keep a value that can be pickled until the peer has read it. Does not wait."""
        key = peer, self._sent[peer]
        self._sent[peer] += 1
        with self._lock:
            reply = self._readers.pop(key, None)
            if reply is None:
                self._messages[key] = message
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

    def receive(self, peer: int, deadline: Deadline) -> Any:
        """Return the next message of a peer.

        Raises:
            PeerLost: the process of the peer ended, it closed the transfer, or there was no message in time.
        """
        from mcontroller.channel.controller import ask_each

        query = ("take", (self._rank, self._received[peer]))
        [answer], late = ask_each([self.peers[peer]], [query], deadline.left(peer))
        if answer is None:
            ended = "connection lost: its process ended, or it closed the transfer"
            raise PeerLost.of(peer, f"no answer within {deadline.seconds:g} s" if late else ended)
        self._received[peer] += 1
        return answer[0]

    def close(self) -> None:
        """Stop being read, which peers that wait notice at once."""
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)
