"""Which storages are on the pretended device, and what crosses between it and the host."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.multiprocessing.reductions import StorageWeakRef

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)

_storages: dict[int, StorageWeakRef] = {}
_OWN_FRAMES = ("/tests/fake_cuda/", "/torch/", "contextlib.py", "functools.py")


class Traffic:
    """Counts of what a GPU program pays for: copies between host and device, and synchronisations.

    Attributes:
        counts: ``"host_to_device"``, ``"device_to_host"``, ``"sync:<operation>"`` -> how often.
        places: the same, with the line of code outside torch that caused it; filled while ``trace`` is set.
        trace: whether to record lines.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.places: Counter[tuple[str, str]] = Counter()
        self.trace = False

    def add(self, kind: str) -> None:
        """Count one event of this kind."""
        self.counts[kind] += 1
        if self.trace:
            self.places[kind, _line_of_caller()] += 1

    def add_copy(self, *, to_device: bool) -> None:
        """Count one copy between host and device."""
        self.add("host_to_device" if to_device else "device_to_host")

    @property
    def synchronisations(self) -> int:
        """How often the host waited for the device; a copy to the host waits too."""
        return sum(n for kind, n in self.counts.items() if kind.startswith("sync:") or kind == "device_to_host")

    def clear(self) -> None:
        """Start counting from zero."""
        self.counts.clear()
        self.places.clear()


traffic = Traffic()


def on_device(tensor: torch.Tensor) -> bool:
    """Whether the tensor's storage is on the pretended device."""
    if isinstance(tensor, ShardedTensor) or (tensor.layout != torch.strided and not tensor.is_nested):
        return False  # a sharded tensor of a checkpoint has no storage of its own
    key = tensor.untyped_storage()._cdata
    reference = _storages.get(key)
    if reference is not None and reference.expired():
        del _storages[key]
        return False
    return reference is not None


def put(tensor: torch.Tensor, device: bool) -> torch.Tensor:
    """Mark the tensor's storage as on the device, or on the host; return the tensor."""
    storage = tensor.untyped_storage()
    if device:
        _storages[storage._cdata] = StorageWeakRef(storage)
    else:
        _storages.pop(storage._cdata, None)
    return tensor


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _line_of_caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _OWN_FRAMES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
