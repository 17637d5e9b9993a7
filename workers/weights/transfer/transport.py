"""The protocol of transports, which carry buckets of weights between the processes of two groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from workers.weights.resharding_schedule import Move
from workers.weights.transfer.errors import PeerLost
from workers.weights.transfer.plan import PeerSlices, RankWeights

__all__ = ["Deadline", "RankTraffic", "Receiver", "Sender", "Transport"]

ALIGNMENT = 64


@dataclass(frozen=True)
class RankTraffic:
    """The slices that one rank sends or receives in a transfer, and how; its end of the transport is made from it.

    Attributes:
        transfer: the id of the transfer.
        rank: its number; ranks of the target follow the ranks of the source.
        size: number of ranks of both groups.
        address: of its node, on which other processes reach it.
        buckets: the slices of each bucket, in the order in which they travel.
        device: the device of its tensors.
        timeout: seconds after which setting up a connection fails.
        direct: the slices that travel outside of the buckets, from weights to weights, in order, if the transport
            ``uses_in_place``.
        in_place: returns the memory of a slice in the weights themselves, uint8 ``[bytes]``, if it can travel from or
            to there without being copied through a buffer.
    """

    transfer: str
    rank: int
    size: int
    address: str
    buckets: tuple[tuple[PeerSlices, ...], ...]
    device: torch.device
    timeout: float
    direct: tuple[Move, ...] = ()
    in_place: Callable[[Move], Tensor | None] = lambda move: None

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The ranks that this one sends to or receives from in buckets."""
        return tuple(sorted({slices.peer for bucket in self.buckets for slices in bucket}))

    @cached_property
    def bucket_bytes(self) -> int:
        """The length of the largest bucket, rounded up so that a second one after it is aligned for any dtype."""
        most = max((sum(slices.nbytes for slices in bucket) for bucket in self.buckets), default=0)
        return -(-most // ALIGNMENT) * ALIGNMENT


class Deadline:
    """A point in time, ``seconds`` after this object was made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self, peer: int) -> float:
        """Return the seconds until then.

        Raises:
            PeerLost: there are none left; the rank that was waited for is ``peer``.
        """
        left = self._at - time.monotonic()
        if left <= 0:
            cause = f"nothing arrived within {self.seconds:g} s"
            raise PeerLost(f"rank {peer} of the transfer: {cause}", peer=peer, cause=cause)
        return left


class End(Protocol):
    """One rank's end of a transport. ``listen`` of all ranks returns before ``connect`` of any is called."""

    def listen(self) -> Any:
        """Return what other ranks need to reach this one: a value that can be pickled, or None."""
        ...

    def connect(self, addresses: Mapping[int, Any], deadline: Deadline) -> None:
        """Connect to the peers.

        Args:
            addresses: the result of ``listen`` by rank.
            deadline: a later connection fails.

        Raises:
            PeerLost: a peer cannot be reached in time.
        """
        ...

    @property
    def buffer_bytes(self) -> int:
        """The memory that this end keeps in addition to the weights."""
        ...

    def start(self) -> None:
        """Start to send or receive the slices that travel outside of the buckets."""
        ...

    def flush(self, deadline: Deadline) -> None:
        """Wait until the peers have received all that was sent, and all that is to be received is there.

        Raises:
            PeerLost: a peer has not received or sent in time, or its process ended.
        """
        ...

    def close(self) -> None:
        """End all connections and free the buffers; in the middle of a transfer too."""
        ...


class Sender(End, Protocol):
    """The end of a rank that sends. At most two buckets are in flight: the next is filled while one travels."""

    def buffer(self, index: int, deadline: Deadline) -> Tensor:
        """Return the memory to fill with the bucket, uint8 ``[bytes]``; wait until it is free.

        The bytes of slices that are sent in place are not read.

        Raises:
            PeerLost: a peer has not received an earlier bucket in time, or its process ended.
        """
        ...

    def send(self, index: int, deadline: Deadline) -> None:
        """Start sending the bucket that the buffer was filled with.

        Raises:
            PeerLost: a peer's process ended.
        """
        ...


class Receiver(End, Protocol):
    """The end of a rank that receives."""

    def receive(self, index: int, deadline: Deadline) -> Iterator[tuple[PeerSlices, Tensor]]:
        """Iterate over the slices of the bucket with their bytes, uint8 ``[bytes]``, each valid until the next one.

        The bytes of slices that were received in place are not set.

        Raises:
            PeerLost: a peer has not sent in time, or its process ended.
        """
        ...


@dataclass(frozen=True)
class Transport:
    """A way to carry buckets between processes.

    Attributes:
        sender, receiver: make the ends of a rank.
        uses_in_place: whether its ends send and receive the slices of ``RankTraffic.in_place`` without a buffer, and so
            the slices of ``RankTraffic.direct``.
        why_not: returns why it cannot be used between these ranks; "" if it can.
    """

    sender: Callable[[RankTraffic], Sender]
    receiver: Callable[[RankTraffic], Receiver]
    why_not: Callable[[Sequence[RankWeights], Sequence[RankWeights]], str]
    uses_in_place: bool = False
