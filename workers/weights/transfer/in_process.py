"""Weights between groups whose ranks are all in the calling process: local and simulated groups."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from workers.weights.transfer.plan import PeerSlices, RankWeights
from workers.weights.transfer.transport import Deadline, PeerLost, Transport

_PENDING: dict[tuple[str, int, int], deque[Tensor]] = defaultdict(deque)
"""Slices that were not received yet, by transfer, sender and receiver."""


class InProcess(Transport):
    """Keeps all buckets until they are received: the ranks of one group run before the ranks of the other."""

    @staticmethod
    def why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
        """Return why not: the ranks are several processes."""
        processes = {(each.node, each.pid) for each in (*sources, *targets)}
        return "" if len(processes) == 1 else f"the ranks are {len(processes)} processes; expected one"

    def buffer(self, index: int, deadline: Deadline) -> Tensor:
        """Return new memory."""
        nbytes = sum(slices.nbytes for slices in self.schedule.buckets[index])
        self._filled = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._filled

    def send(self, index: int, deadline: Deadline) -> None:
        """Keep the bucket."""
        for slices in self.schedule.buckets[index]:
            part = self._filled[slices.start : slices.start + slices.nbytes]
            _PENDING[self.schedule.transfer, self.schedule.rank, slices.peer].append(part)

    def receive(self, index: int, deadline: Deadline) -> Iterator[tuple[PeerSlices, Tensor]]:
        """Iterate over the slices that were kept."""
        for slices in self.schedule.buckets[index]:
            parts = _PENDING[self.schedule.transfer, slices.peer, self.schedule.rank]
            if not parts:
                raise PeerLost.of(
                    slices.peer, "it has sent nothing: in one process, the source sends before the target receives"
                )
            yield slices, parts.popleft()

    def close(self) -> None:
        """Drop what was not received."""
        for key in [key for key in _PENDING if key[0] == self.schedule.transfer and self.schedule.rank in key[1:]]:
            del _PENDING[key]
