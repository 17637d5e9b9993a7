"""Weights between processes of one node on CPUs, through memory that both have mapped.

The memory is an anonymous file, which only processes of this user can open, and which the kernel frees when the last
process that has mapped it ends, however it ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from workers.weights.transfer.errors import PeerLost
from workers.weights.transfer.linked.links import Link
from workers.weights.transfer.linked.mapped import MappedReceiver, MappedSender
from workers.weights.transfer.plan import RankWeights
from workers.weights.transfer.transport import Deadline, Transport

__all__ = ["TRANSPORT"]


class _Sender(MappedSender):
    def share(self, links: Mapping[int, Link], deadline: Deadline) -> Tensor:
        descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(self.buffer_bytes, 1))
            for link in links.values():
                link.send((f"/proc/{os.getpid()}/fd/{descriptor}", self.buffer_bytes))
            for link in links.values():
                link.receive(deadline)
            return _mapped(descriptor, self.buffer_bytes)
        finally:
            os.close(descriptor)


class _Receiver(MappedReceiver):
    def map_memory(self, link: Link, deadline: Deadline) -> Tensor:
        path, size = link.receive(deadline)
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            cause = f"its memory cannot be opened: {error}"
            raise PeerLost(f"rank {link.peer} of the transfer: {cause}", peer=link.peer, cause=cause) from error
        try:
            memory = _mapped(descriptor, size)
        finally:
            os.close(descriptor)
        link.send(None)
        return memory


def _mapped(descriptor: int, size: int) -> Tensor:
    """Return the shared memory as uint8 ``[size]``; it is mapped as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(descriptor, max(size, 1)), dtype=torch.uint8)[:size]


def _why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
    everyone = (*sources, *targets)
    nodes = sorted({each.node for each in everyone})
    if len(nodes) > 1:
        return f"the ranks are on {len(nodes)} nodes; expected one"
    if any(each.device != "cpu" for each in everyone):
        return "the weights are on GPUs; expected CPUs (cuda_ipc is for GPUs)"
    processes = {each.pid for each in everyone}
    return "the groups are in one process" if len(processes) < len(everyone) else ""


TRANSPORT = Transport(_Sender, _Receiver, _why_not)
