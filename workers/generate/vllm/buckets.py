"""Weights in buckets of shared memory: one bucket is read by the engine while the next one is filled."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.generate.vllm.in_engine.registered_memory import register_memory, unregister_memory

__all__ = ["BucketContent", "TensorSpec", "send_in_buckets"]

TensorSpec = tuple[str, str, tuple[int, ...], int]
"""Name, name of the dtype, shape, and first byte in the bucket."""

_ALIGNMENT = 64


@dataclass(frozen=True)
class BucketContent:
    """A filled bucket.

    Attributes:
        path: a path that processes of the same user on this node can open.
        tensors: what it contains.
    """

    path: str
    tensors: list[TensorSpec]


@dataclass
class _Bucket:
    """A file in memory, without a name in the file system: it ends with this process."""

    size: int
    descriptor: int = field(default_factory=lambda: os.memfd_create("weights"))
    tensors: list[TensorSpec] = field(default_factory=list)
    used: int = 0
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    copies_pending: bool = False

    def has_room_for(self, tensor: Tensor) -> bool:
        return not self.tensors or self.used + tensor.nbytes <= self.size

    def add(self, name: str, tensor: Tensor) -> None:
        end = self.used + tensor.nbytes
        if end > len(self.memory):
            self._grow(max(end, self.size))
        flat = self.memory[self.used : end].view(tensor.dtype) if tensor.nbytes else tensor.new_empty(0, device="cpu")
        flat.copy_(tensor.detach().reshape(-1), non_blocking=True)
        self.copies_pending |= tensor.is_cuda
        self.tensors.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), self.used))
        self.used = -(-end // _ALIGNMENT) * _ALIGNMENT

    def content(self) -> BucketContent:
        if self.copies_pending:
            torch.cuda.current_stream().synchronize()
            self.copies_pending = False
        return BucketContent(f"/proc/{os.getpid()}/fd/{self.descriptor}", self.tensors)

    def clear(self) -> None:
        self.tensors, self.used = [], 0

    def close(self) -> None:
        unregister_memory(self.memory)
        self.memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)

    def _grow(self, size: int) -> None:
        unregister_memory(self.memory)
        os.ftruncate(self.descriptor, size)
        # Only an empty bucket grows: it has room for one tensor of any size.
        self.memory = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        register_memory(self.memory)


def send_in_buckets(
    weights: Iterable[tuple[str, Tensor]],
    bucket_bytes: int,
    send: Callable[[BucketContent], None],
    wait: Callable[[], None],
) -> int:
    """Send named tensors in two buckets in turn, and return the number of their bytes.

    Args:
        weights: the tensors. All are taken, one at a time.
        bucket_bytes: the size of a bucket; a larger tensor has one for itself.
        send: starts to send a bucket.
        wait: waits until the bucket that was sent last may be filled again; called once after each ``send``.
    """
    filling, sent = _Bucket(bucket_bytes), _Bucket(bucket_bytes)
    total, in_flight = 0, False
    try:
        for name, tensor in weights:
            if not filling.has_room_for(tensor):
                if in_flight:
                    wait()
                send(filling.content())
                in_flight = True
                filling, sent = sent, filling
                filling.clear()
            filling.add(name, tensor)
            total += tensor.nbytes
        if in_flight:
            wait()
        if filling.tensors:
            send(filling.content())
            wait()
    finally:
        filling.close()
        sent.close()
    return total
