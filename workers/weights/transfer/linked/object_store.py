"""Weights through Ray's object store: the fallback, between any two groups on Ray.

A sender puts the slices of a bucket for one receiver into the store, and sends the reference. It keeps the reference
until they were read.
Ray is imported when it is used: workers also run without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workers.weights.transfer.errors import PeerLost
from workers.weights.transfer.linked.ends import LinkedReceiver, LinkedSender
from workers.weights.transfer.plan import PeerSlices, RankWeights
from workers.weights.transfer.transport import Deadline, RankTraffic, Transport

if TYPE_CHECKING:
    import numpy as np
    import ray

__all__ = ["TRANSPORT"]


class _Sender(LinkedSender):
    def __init__(self, traffic: RankTraffic) -> None:
        super().__init__(traffic)
        self.buffer_bytes = 2 * traffic.bucket_bytes  # one to fill, and one in the store while the other is filled
        self._memory = torch.empty(traffic.bucket_bytes, dtype=torch.uint8)
        self._stored: dict[int, list[ray.ObjectRef[Any]]] = {}

    def buffer(self, index: int, deadline: Deadline) -> Tensor:
        self.wait_until_read(index - 1, deadline)
        return self._memory

    def send(self, index: int, deadline: Deadline) -> None:
        import ray

        from mcontroller.ray.values.references import write_reference

        for slices in self.traffic.buckets[index]:
            reference = ray.put(self._memory[slices.start : slices.start + slices.nbytes].numpy())
            self._stored.setdefault(index, []).append(reference)
            self.send_message(index, slices, write_reference(reference))

    def wait_until_read(self, index: int, deadline: Deadline) -> None:
        super().wait_until_read(index, deadline)
        self._stored.pop(index, None)

    def close(self) -> None:
        super().close()
        self._stored = {}


class _Receiver(LinkedReceiver):
    def read(self, slices: PeerSlices, deadline: Deadline) -> Tensor:
        import ray

        from mcontroller.ray.values.references import read_reference

        link = self.links[slices.peer]
        reference = read_reference(link.receive(deadline))
        try:
            array: np.ndarray[Any, Any] = ray.get(reference, timeout=deadline.left(link.peer))
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise PeerLost(f"rank {link.peer} of the transfer: {error}", peer=link.peer, cause=str(error)) from error
        return torch.frombuffer(array.data, dtype=torch.uint8)


def _why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
    everyone = (*sources, *targets)
    if any(each.device != "cpu" for each in everyone):
        return "the weights are on GPUs: a copy to the host and back is not implemented"
    if len({(each.node, each.pid) for each in everyone}) < len(everyone):
        return "ranks of the groups share a process"
    ray = sys.modules.get("ray")
    return "" if ray is not None and ray.is_initialized() else "Ray is not running"


TRANSPORT = Transport(_Sender, _Receiver, _why_not)
