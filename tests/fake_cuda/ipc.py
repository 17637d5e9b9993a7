"""CUDA IPC of the fake CUDA device: tensors that one process exports and another maps, in memory with a descriptor.

As in torch, the exporting process counts the processes that use the memory, and keeps it until they have dropped it, or
the count was released on their behalf.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

from tests.fake_cuda.tags import device_of, gpu, mark, on_device

exported: dict[tuple[bytes, int], Any] = {}
"""The storages that this process has exported, by the counter of each user that was not released."""

_offsets = itertools.count()


def install() -> None:
    """Replace what torch exports, maps and releases CUDA memory with."""
    reductions.reduce_tensor = _exporting(reductions.reduce_tensor)
    torch.UntypedStorage._release_ipc_counter = staticmethod(_release)
    torch.cuda.ipc_collect = lambda: None


def rebuild_tensor(
    tensor_size: torch.Size,
    storage_device: int,
    storage_handle: tuple[int, int, int, str],
    ref_counter_handle: bytes,
    ref_counter_offset: int,
) -> torch.Tensor:
    """Map an exported tensor; ``storage_device`` is the index of its GPU in this process."""
    pid, descriptor, nbytes, uuid = storage_handle
    here = torch.cuda.get_device_properties(storage_device).uuid
    if here != uuid or pid == os.getpid():
        raise RuntimeError(f"CUDA error: invalid argument (memory of {uuid} of process {pid}, opened on {here})")
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        memory = torch.frombuffer(mmap.mmap(opened, nbytes), dtype=torch.uint8)
    finally:
        os.close(opened)
    mark(memory.untyped_storage(), gpu(storage_device), size=0)  # counted by the process that allocated it
    return memory.view(tensor_size)


def _exporting(reduce_tensor: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def reduce(tensor: torch.Tensor) -> Any:
        if not on_device(tensor):
            return reduce_tensor(tensor)
        assert tensor.dtype == torch.uint8 and tensor.is_contiguous() and tensor.storage_offset() == 0
        storage, device = tensor.untyped_storage(), device_of(tensor)
        descriptor, nbytes = storage._share_fd_cpu_()  # moves the bytes to memory that has a descriptor
        counter = str(os.getpid()).encode(), next(_offsets)
        exported[counter] = storage
        handle = (os.getpid(), descriptor, nbytes, torch.cuda.get_device_properties(device).uuid)
        return rebuild_tensor, (tensor.shape, device.index, handle, *counter)

    return reduce


def _release(ref_counter_handle: bytes, ref_counter_offset: int, device: Any = None) -> None:
    exported.pop((ref_counter_handle, ref_counter_offset), None)
