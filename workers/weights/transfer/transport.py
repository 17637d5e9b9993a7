"""What transports have in common, which carry buckets of weights between the processes of two groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mcontroller.errors import MControllerError
from workers.weights.resharding_schedule import Move
from workers.weights.transfer.plan import PeerSlices, RankSchedule, RankWeights


class TransferError(MControllerError):
    """A transfer of weights that did not complete; the source group is usable, the target's weights are incomplete.

    Attributes:
        source, target: the names of the groups.
        failures: what each rank reports, by group and rank: ``{("rollout", 1): "process ended"}``.
    """

    source: str
    target: str
    failures: dict[tuple[str, int], str]


class PeerLost(MControllerError):
    """A rank of the other group that did not send or receive in time, or whose process ended.

    Attributes:
        peer: its number: ranks of the target follow the ranks of the source.
        cause: what was observed.
    """

    peer: int
    cause: str

    @classmethod
    def of(cls, peer: int, cause: str) -> PeerLost:
        """Return the error for a rank."""
        return cls(f"rank {peer} of the transfer: {cause}", peer=peer, cause=cause)


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
            raise PeerLost.of(peer, f"nothing arrived within {self.seconds:g} s")
        return left


class Transport:
    """One rank's end of a transfer, as it is without connections and without memory of its own.

    ``listen`` of all ranks returns before ``connect`` of any is called. A rank that sends calls ``buffer`` and ``send``
    for every bucket, with at most two of them in flight; a rank that receives calls ``receive``. Whatever waits raises
    PeerLost if a peer does not send or receive before the deadline, or if its process has ended.

    Args:
        schedule: what the rank sends or receives.
        device: of its tensors.
        address: of this node, on which other processes reach it.
        direct_memory: returns the memory of a slice of the weights, uint8 ``[bytes]``, if the transport
            ``sends_directly``.

    Attributes:
        sends_directly: whether slices that are contiguous on both sides travel outside of the buckets.
        buffer_bytes: the memory that this end keeps in addition to the weights.
    """

    sends_directly: ClassVar[bool] = False
    buffer_bytes = 0

    def __init__(
        self,
        schedule: RankSchedule,
        device: torch.device,
        address: str,
        direct_memory: Callable[[Move], Tensor] | None = None,
    ) -> None:
        self.schedule, self.device, self.address, self.direct_memory = schedule, device, address, direct_memory

    @staticmethod
    def why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
        """Return why the transport cannot be used between these ranks; "" if it can."""
        raise NotImplementedError

    def listen(self) -> Any:
        """Return what other ranks need to reach this one: a value that can be pickled, or None."""

    def connect(self, addresses: Mapping[int, Any], deadline: Deadline) -> None:
        """Connect to the peers; ``addresses`` are what ``listen`` returned, by rank."""

    def start(self) -> None:
        """Start to send or receive the slices that travel outside of the buckets."""

    def buffer(self, index: int, deadline: Deadline) -> Tensor:
        """Return the memory to fill with the bucket, uint8 ``[bytes]``; wait until it is free."""
        raise NotImplementedError

    def send(self, index: int, deadline: Deadline) -> None:
        """Start sending the bucket that the buffer was filled with."""
        raise NotImplementedError

    def receive(self, index: int, deadline: Deadline) -> Iterator[tuple[PeerSlices, Tensor]]:
        """Iterate over the slices of the bucket with their bytes, uint8 ``[bytes]``, each valid until the next one."""
        raise NotImplementedError

    def flush(self, deadline: Deadline) -> None:
        """Wait until the peers have received all that was sent, and all that is to be received is there."""

    def close(self) -> None:
        """End all connections and free the buffers; in the middle of a transfer too."""
