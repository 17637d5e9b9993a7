"""Weights between groups whose ranks are all in the calling process: local and simulated groups.

The ranks of one group run before the ranks of the other, so all buckets are kept until they are received.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workers.weights.transfer.errors import PeerLost
from workers.weights.transfer.plan import PeerSlices, RankWeights
from workers.weights.transfer.transport import Deadline, RankTraffic, Transport

__all__ = ["TRANSPORT"]

_PENDING: dict[tuple[str, int, int], deque[Tensor]] = defaultdict(deque)
"""Slices that were not received yet, by transfer, sender and receiver."""


class _End:
    buffer_bytes = 0

    def __init__(self, traffic: RankTraffic) -> None:
        self._traffic = traffic

    def listen(self) -> None:
        """Return nothing: there is nothing to connect to."""

    def connect(self, addresses: Mapping[int, Any], deadline: Deadline) -> None:
        """Do nothing."""

    def start(self) -> None:
        """Do nothing: everything travels in buckets."""

    def flush(self, deadline: Deadline) -> None:
        """Do nothing: what was sent can be received, and what was received is there."""

    def close(self) -> None:
        """Drop what was not received."""
        for key in [key for key in _PENDING if key[0] == self._traffic.transfer and self._traffic.rank in key[1:]]:
            del _PENDING[key]


class _Sender(_End):
    def buffer(self, index: int, deadline: Deadline) -> Tensor:
        nbytes = sum(slices.nbytes for slices in self._traffic.buckets[index])
        self._filled = torch.empty(nbytes, dtype=torch.uint8, device=self._traffic.device)
        return self._filled

    def send(self, index: int, deadline: Deadline) -> None:
        for slices in self._traffic.buckets[index]:
            part = self._filled[slices.start : slices.start + slices.nbytes]
            _PENDING[self._traffic.transfer, self._traffic.rank, slices.peer].append(part)


class _Receiver(_End):
    def receive(self, index: int, deadline: Deadline) -> Iterator[tuple[PeerSlices, Tensor]]:
        for slices in self._traffic.buckets[index]:
            parts = _PENDING[self._traffic.transfer, slices.peer, self._traffic.rank]
            if not parts:
                cause = "it has sent nothing: in one process, the source sends before the target receives"
                raise PeerLost(f"rank {slices.peer} of the transfer: {cause}", peer=slices.peer, cause=cause)
            yield slices, parts.popleft()


def _why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
    processes = {(each.node, each.pid) for each in (*sources, *targets)}
    return "" if len(processes) == 1 else f"the ranks are {len(processes)} processes; expected one"


TRANSPORT = Transport(_Sender, _Receiver, _why_not)
