"""Buckets in memory that a sender and its receivers have mapped: two copies, in and out, between ranks of one node.

A sender allocates two buckets, and each of its receivers maps both when it connects. For the slices of a bucket that go
to one receiver, the sender sends it their position in this memory; the receiver answers when it has read them. A sender
fills a bucket again when all receivers have read it.
"""

from __future__ import annotations

import inspect
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from workers.gpu_ids import gpu_id, visible_gpus
from workers.weights.transfer.mailbox import Mailbox
from workers.weights.transfer.plan import PeerSlices, RankWeights
from workers.weights.transfer.transport import Deadline, PeerLost, Transport

if TYPE_CHECKING:
    from mcontroller.channel.address import Address

_IN_FLIGHT = 2


class _Mapped(Transport):
    """A rank's mailbox, its buckets, and the buckets of its senders. Subclasses define how memory is shared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffer_bytes = _IN_FLIGHT * self.schedule.bucket_bytes if self.schedule.sends else 0
        self._mailbox = Mailbox(self.schedule.rank, self.address)
        self._memory: dict[int, Tensor] = {}
        """By rank, this one or a sender, the memory that it shares."""
        self._unread: dict[int, list[int]] = {}
        """By bucket, the receivers that have not read it."""

    def _share(self, deadline: Deadline) -> Tensor:
        """Allocate ``buffer_bytes``, let the receivers map them, and return them, uint8 ``[bytes]``."""
        raise NotImplementedError

    def _map(self, peer: int, message: Any) -> Tensor:
        """Return the memory that a sender shares by this message, uint8 ``[bytes]``; mapped as long as it lives."""
        raise NotImplementedError

    def listen(self) -> Address:
        """Return the address that peers read messages from."""
        return self._mailbox.address

    def connect(self, addresses: Mapping[int, Address], deadline: Deadline) -> None:
        """Share the buckets with the receivers, or map those of the senders."""
        self._mailbox.peers = addresses
        if self.schedule.sends:
            self._memory = {self.schedule.rank: self._share(deadline)}
        else:
            receive = self._mailbox.receive
            self._memory = {peer: self._map(peer, receive(peer, deadline)) for peer in self.schedule.peers}

    def buffer(self, index: int, deadline: Deadline) -> Tensor:
        """Return the memory of a bucket, after the one before in it was read."""
        self._wait_until_read(index - _IN_FLIGHT, deadline)
        return self._memory[self.schedule.rank][self._start(index) :][: self.schedule.bucket_bytes]

    def send(self, index: int, deadline: Deadline) -> None:
        """Send each receiver the position of its slices."""
        for slices in self.schedule.buckets[index]:
            self._unread.setdefault(index, []).append(slices.peer)
            self._mailbox.send(slices.peer, self._start(index) + slices.start)

    def _start(self, index: int) -> int:
        return index % _IN_FLIGHT * self.schedule.bucket_bytes

    def _wait_until_read(self, index: int, deadline: Deadline) -> None:
        for peer in self._unread.pop(index, ()):
            self._mailbox.receive(peer, deadline)

    def receive(self, index: int, deadline: Deadline) -> Iterator[tuple[PeerSlices, Tensor]]:
        """Iterate over the slices with their memory in the senders' buckets; answer when each was read."""
        for slices in self.schedule.buckets[index]:
            start: int = self._mailbox.receive(slices.peer, deadline)
            yield slices, self._memory[slices.peer][start : start + slices.nbytes]
            self._mailbox.send(slices.peer, None)

    def flush(self, deadline: Deadline) -> None:
        """Wait until all buckets were read."""
        for index in sorted(self._unread):
            self._wait_until_read(index, deadline)

    def close(self) -> None:
        """Close the mailbox, which the peers notice at once, and drop the memory."""
        self._mailbox.close()
        self._memory, self._unread = {}, {}


class SharedMemory(_Mapped):
    """Memory of an anonymous file, between processes on CPUs.

    Only processes of this user can open it, and the kernel frees it when the last process that has mapped it ends,
    however it ends.
    """

    @staticmethod
    def why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
        """Return why not: several nodes, GPUs, or one process."""
        everyone = (*sources, *targets)
        nodes = sorted({each.node for each in everyone})
        if len(nodes) > 1:
            return f"the ranks are on {len(nodes)} nodes; expected one"
        if any(each.device != "cpu" for each in everyone):
            return "the weights are on GPUs; expected CPUs (cuda_ipc is for GPUs)"
        processes = {each.pid for each in everyone}
        return "the groups are in one process" if len(processes) < len(everyone) else ""

    def _share(self, deadline: Deadline) -> Tensor:
        descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(self.buffer_bytes, 1))
            for peer in self.schedule.peers:
                self._mailbox.send(peer, (f"/proc/{os.getpid()}/fd/{descriptor}", self.buffer_bytes))
            for peer in self.schedule.peers:
                self._mailbox.receive(peer, deadline)
            return _mapped(descriptor, self.buffer_bytes)
        finally:
            os.close(descriptor)

    def _map(self, peer: int, message: Any) -> Tensor:
        path, size = message
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise PeerLost.of(peer, f"its memory cannot be opened: {error}") from error
        try:
            memory = _mapped(descriptor, size)
        finally:
            os.close(descriptor)
        self._mailbox.send(peer, None)
        return memory


def _mapped(descriptor: int, size: int) -> Tensor:
    """Return the shared memory as uint8 ``[size]``; it is mapped as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(descriptor, max(size, 1)), dtype=torch.uint8)[:size]


class CudaIpc(_Mapped):
    """CUDA memory that both have mapped. Status: tested on a fake CUDA device only.

    For groups whose ranks share GPUs: NCCL rejects two processes of one GPU in a communicator. A sender allocates its
    two buckets on its own GPU, and exports them once for each receiver with torch's reduction of CUDA tensors. The
    receiver maps them on the same GPU, whose index may differ there, and copies from them to its weights: within the
    GPU, or to another GPU of the node if its weights are there.

    The order of reads and writes does not depend on events of CUDA: the sender synchronizes its stream before it sends
    that a bucket is full, and the receiver its own before it answers that it has read it.

    torch frees exported memory when all receivers have dropped it, and a process that was killed never does. So the
    sender drops the memory on behalf of its receivers when the transfer is closed: nothing reads it from then on.
    """

    _exports: Sequence[dict[str, Any]] = ()
    """The arguments that each receiver maps the buckets with."""

    @staticmethod
    def why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
        """Return why not: CPUs, several nodes, one process, or GPUs that a receiver cannot use."""
        everyone = (*sources, *targets)
        if any(each.device == "cpu" for each in everyone):
            return "there are weights on CPUs; expected GPUs"
        nodes = {each.node for each in everyone}
        if len(nodes) > 1:
            return f"the ranks are on {len(nodes)} nodes; expected one"
        if len({each.pid for each in everyone}) < len(everyone):
            return "ranks of the groups share a process"
        for rank, target in enumerate(targets):
            for gpu in sorted({source.device for source in sources} - set(target.visible)):
                return (
                    f"rank {rank} that receives cannot use GPU {gpu}, which weights come from: let it see that GPU "
                    "(a pool without isolate_gpus)"
                )
        return ""

    def _share(self, deadline: Deadline) -> Tensor:
        memory = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self.device)
        for peer in self.schedule.peers:
            rebuild, arguments = reductions.reduce_tensor(memory)  # each counts as one receiver
            self._exports = [*self._exports, _by_name(rebuild, arguments)]
            self._mailbox.send(peer, (gpu_id(self.device), rebuild, arguments))
        return memory

    def _map(self, peer: int, message: Any) -> Tensor:
        gpu, rebuild, arguments = message
        try:
            memory: Tensor = rebuild(**_by_name(rebuild, arguments) | {"storage_device": visible_gpus().index(gpu)})
        except RuntimeError as error:
            raise PeerLost.of(peer, f"its memory on GPU {gpu} cannot be mapped: {error}") from error
        return memory

    def close(self) -> None:
        """Release what was exported, and drop the memory."""
        for export in self._exports:
            torch.UntypedStorage._release_ipc_counter(
                export["ref_counter_handle"], export["ref_counter_offset"], device="cuda"
            )
        self._exports = ()
        super().close()
        if self.schedule.sends:
            torch.cuda.ipc_collect()


def _by_name(rebuild: Callable[..., Tensor], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of torch's function that maps an exported tensor, by name."""
    return dict(inspect.signature(rebuild).bind(*arguments).arguments)
