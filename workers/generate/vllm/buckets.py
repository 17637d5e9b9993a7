"""Weights in two buckets of shared memory: one is read by the engine while the other one is filled."""

from __future__ import annotations

import mmap
import os
import weakref

import torch
from torch import Tensor

from workers.weights.in_engine.registered_memory import register_memory, unregister_memory


class SharedBuckets:
    """Two files in memory, without names in the file system: they end with this object, and with this process.

    Their pages are locked if the process uses GPUs, and stay so between updates: to map, zero and lock them again would
    take longer than the copies.

    Args:
        size: [bytes] of a bucket; one with a larger tensor grows.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._files = [os.memfd_create("weights") for _ in range(2)]
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._filling = 0
        self._end = weakref.finalize(self, _free, self._files, self._memory)
        self._end.atexit = False  # CUDA may have ended before

    @property
    def path(self) -> str:
        """The path of the bucket that was filled last, which processes of the same user on this node can open."""
        return f"/proc/{os.getpid()}/fd/{self._files[self._filling]}"

    def memory(self, nbytes: int) -> Tensor:
        """Return the memory of the other bucket, which must not be read any more, uint8 of at least ``nbytes``."""
        self._filling = 1 - self._filling
        memory = self._memory[self._filling]
        if memory.nbytes < nbytes:
            unregister_memory(memory)
            size, file = max(nbytes, self._size), self._files[self._filling]
            os.ftruncate(file, size)
            memory = self._memory[self._filling] = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
            register_memory(memory)
        return memory

    def close(self) -> None:
        """Free the memory."""
        self._end()


def _free(files: list[int], memory: list[Tensor]) -> None:
    for pages, file in zip(memory, files, strict=True):
        unregister_memory(pages)
        os.close(file)
    memory.clear()
