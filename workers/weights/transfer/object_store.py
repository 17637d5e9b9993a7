"""Weights through Ray's object store: the fallback, between any two groups on Ray.

A sender puts each parcel into the store, and sends the reference. It keeps the reference until the parcel was read.
Ray is imported when it is used: workers also run without it.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workers.weights.transfer.errors import PeerLost
from workers.weights.transfer.links import Link, Listener, ListenerAddress, connected
from workers.weights.transfer.plan import Holdings, Parcel
from workers.weights.transfer.transport import Deadline, RankTraffic, Transport

if TYPE_CHECKING:
    import numpy as np
    import ray

__all__ = ["TRANSPORT"]

_IN_FLIGHT = 2


class _Sender:
    def __init__(self, traffic: RankTraffic) -> None:
        self._traffic = traffic
        self.buffer_bytes = 2 * traffic.bucket_bytes  # one to fill, and one in the store while the other is filled
        self._listener = Listener(traffic.address)
        self._links: dict[int, Link] = {}
        self._memory = torch.empty(traffic.bucket_bytes, dtype=torch.uint8)
        self._unread: dict[int, list[tuple[int, ray.ObjectRef[Any]]]] = {}

    def listen(self) -> ListenerAddress:
        return self._listener.address

    def connect(self, addresses: Mapping[int, ListenerAddress], deadline: Deadline) -> None:
        self._links = self._listener.accept(self._traffic.peers, deadline)

    def buffer(self, index: int, deadline: Deadline) -> Tensor:
        self._wait_until_read(index - _IN_FLIGHT + 1, deadline)
        return self._memory

    def send(self, index: int, deadline: Deadline) -> None:
        import ray

        from mcontroller.ray.values.references import write_reference

        for parcel in self._traffic.buckets[index]:
            reference = ray.put(self._memory[parcel.start : parcel.start + parcel.nbytes].numpy())
            self._unread.setdefault(index, []).append((parcel.peer, reference))
            self._links[parcel.peer].send(pickle.dumps(tuple(write_reference(reference))), deadline)

    def flush(self, deadline: Deadline) -> None:
        for index in sorted(self._unread):
            self._wait_until_read(index, deadline)

    def close(self) -> None:
        self._listener.close()
        for link in self._links.values():
            link.close()
        self._links, self._unread = {}, {}

    def _wait_until_read(self, index: int, deadline: Deadline) -> None:
        for peer, _ in self._unread.pop(index, ()):
            self._links[peer].receive(deadline)


class _Receiver:
    buffer_bytes = 0  # an object of the store is read where it is

    def __init__(self, traffic: RankTraffic) -> None:
        self._traffic = traffic
        self._links: dict[int, Link] = {}

    def listen(self) -> None:
        """Return nothing: receivers connect to senders."""

    def connect(self, addresses: Mapping[int, ListenerAddress], deadline: Deadline) -> None:
        for peer in self._traffic.peers:
            self._links[peer] = connected(addresses[peer], self._traffic.rank, peer, deadline)

    def receive(self, index: int, deadline: Deadline) -> Iterator[tuple[Parcel, Tensor]]:
        for parcel in self._traffic.buckets[index]:
            link = self._links[parcel.peer]
            yield parcel, _read(link, deadline)
            link.send(b"", deadline)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links = {}


def _read(link: Link, deadline: Deadline) -> Tensor:
    import ray

    from mcontroller.ray.values.references import WrittenReference, read_reference

    reference = read_reference(WrittenReference(*pickle.loads(link.receive(deadline)[0])))
    try:
        array: np.ndarray[Any, Any] = ray.get(reference, timeout=deadline.left(link.peer))
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise PeerLost(f"rank {link.peer} of the transfer: {error}", peer=link.peer, cause=str(error)) from error
    return torch.frombuffer(array.data, dtype=torch.uint8)


def _why_not(sources: Sequence[Holdings], targets: Sequence[Holdings]) -> str:
    everyone = (*sources, *targets)
    if any(each.device != "cpu" for each in everyone):
        return "the weights are on GPUs: a copy to the host and back is not implemented"
    if len({(each.node, each.pid) for each in everyone}) < len(everyone):
        return "ranks of the groups share a process"
    ray = sys.modules.get("ray")
    return "" if ray is not None and ray.is_initialized() else "Ray is not running"


TRANSPORT = Transport(_Sender, _Receiver, _why_not)
