"""Storages on the fake CUDA devices: their bytes, and what is copied between them and the host."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from tests.fake_cuda.reserved import reserve

CPU = torch.device("cpu")
GPUS = tuple(torch.device("cuda", index) for index in range(8))
"""The fake CUDA devices of this node."""

_OWN_FRAMES = ("/tests/fake_cuda/", "/torch/", "contextlib.py", "functools.py")


class _Current(threading.local):
    """The current device: every thread starts with GPU 0, as in CUDA."""

    index = 0


current = _Current()


class _Initialization:
    """Whether a process has used CUDA, which reads environment variables at the first use and does not survive a fork.

    Attributes:
        pid: the process that has; None for none.
        variables: its environment then.
        contexts: the GPUs on which it has a context.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self.variables: dict[str, str] = {}
        self.contexts: set[int] = set()

    def use(self) -> None:
        """Initialize CUDA at the first use; raise torch's error in a process that was forked after it."""
        if self.pid is None:
            self.pid, self.variables, self.contexts = os.getpid(), dict(os.environ), set()
        elif self.pid != os.getpid():
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method"
            )

    def forget(self) -> None:
        """Begin as a process that has not used CUDA."""
        self.pid, self.contexts = None, set()


initialization = _Initialization()


def gpu_count() -> int:
    """Return how many GPUs the process can see: of MIG devices one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(GPUS)
    names = [name for name in visible.split(",") if name]
    return min(len(names), 1) if visible.startswith("MIG-") else len(names)


def gpu(index: int | None = None) -> torch.device:
    """Return the GPU of this index, by default the current one; raise CUDA's error if there is none."""
    index = current.index if index is None else index
    if not 0 <= index < min(gpu_count(), len(GPUS)):
        raise torch.AcceleratorError(f"CUDA error: invalid device ordinal ({index}; {gpu_count()} are visible)")
    return GPUS[index]


CONTEXT_BYTES = 512 << 20
"""Bytes of the context that a process opens on every GPU that it uses, also to map memory of another process."""


class Memory:
    """Bytes of the live storages of one GPU, and those beside them.

    Attributes:
        allocated: bytes now.
        peak: the most so far.
        reserved: bytes that a caching allocator would keep: the most since ``empty``.
        peak_reserved: the most reserved so far.
        changes: how often bytes were added.
        beside: bytes that other libraries than torch hold, such as the buffers of NCCL.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.changes = self.beside = 0
        self.allocated = self.peak = self.reserved = self.peak_reserved = 0

    @property
    def used(self) -> int:
        """The bytes that this process has of the GPU: reserved ones, its context, and those of other libraries."""
        return self.reserved + self._outside()

    def open(self) -> Memory:
        """Open the context of this process, if it has none on this GPU; return this object."""
        initialization.use()
        if self.index not in initialization.contexts:
            initialization.contexts.add(self.index)
            reserve(self.index, self.used)
        return self

    def hold(self, size: int) -> None:
        """Add bytes of another library than torch, or remove them; raise OutOfMemoryError if the GPU is full."""
        reserve(self.index, self.open().used + size)
        self.beside += size

    def add(self, size: int) -> None:
        """Count a storage of this size; raise OutOfMemoryError if the GPU is full."""
        if self.allocated + size > self.reserved:
            self._reserve(self.allocated + size)
        self.changes += 1
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _reserve(self, size: int) -> None:
        try:
            reserve(self.index, size + self._outside())
        except torch.OutOfMemoryError:
            self.empty()  # as a caching allocator does before it gives up
            reserve(self.index, size + self._outside())

    def _outside(self) -> int:
        return self.beside + CONTEXT_BYTES * (self.index in initialization.contexts)

    def empty(self) -> None:
        """Return what is reserved and not allocated."""
        self.reserved = self.allocated
        reserve(self.index, self.used)

    def reset_peak(self) -> None:
        """Forget the largest figures so far."""
        self.peak, self.peak_reserved = self.allocated, self.reserved


memory = {device: Memory(device.index) for device in GPUS}


class _Block:
    """The mark of a storage on a GPU. It is an attribute of the storage, and ends with it."""

    __slots__ = ("device", "fixed", "memory", "size")

    def __init__(self, device: torch.device, size: int, fixed: bool) -> None:
        self.device, self.memory, self.size = device, memory[device].open(), 0
        self.memory.add(size)
        self.size, self.fixed = size, fixed

    def resize(self, size: int) -> None:
        if size != self.size and not self.fixed:
            self.memory.add(size - self.size)
            self.size = size

    def __del__(self) -> None:
        self.memory.allocated -= self.size


class Traffic:
    """Counts of what a GPU program pays for: copies between host and device, and synchronisations.

    Attributes:
        counts: ``"host_to_device"``, ``"device_to_host"``, ``"sync:<operation>"`` -> how often.
        places: the same, with the line of code outside torch that caused it; filled while ``trace`` is set.
        trace: whether to record lines.
        warn: whether a synchronisation warns, as after ``torch.cuda.set_sync_debug_mode("warn")``.
        wait: waits for the current stream.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.places: Counter[tuple[str, str]] = Counter()
        self.trace = False
        self.warn = False
        self.wait: Callable[[], None] = lambda: None

    def set_sync_debug_mode(self, mode: str | int) -> None:
        """Warn of synchronisations, or no longer: torch's function of the same name."""
        self.warn = mode in ("warn", 1)

    def add(self, kind: str) -> None:
        """Count one event of this kind."""
        self.counts[kind] += 1
        if kind.startswith("sync:"):
            self.wait()
        if self.warn and _waits(kind):
            place, _, _ = _line_of_caller().partition(" in ")
            filename, _, line = place.rpartition(":")
            warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, filename, int(line))
        if self.trace:
            self.places[kind, _line_of_caller()] += 1

    def add_copy(self, source: torch.device, destination: torch.device, asynchronous: bool = False) -> None:
        """Count one copy between two devices."""
        names = ["host" if device.type == "cpu" else "device" for device in (source, destination)]
        self.add("_to_".join(names) + ("_asynchronously" if asynchronous else ""))
        if "host" in names and not asynchronous:
            self.wait()

    @property
    def synchronisations(self) -> int:
        """How often the host waited for the device; a copy to the host waits too."""
        return sum(n for kind, n in self.counts.items() if _waits(kind))

    def clear(self) -> None:
        """Start counting from zero."""
        self.counts.clear()
        self.places.clear()


def _waits(kind: str) -> bool:
    return kind.startswith("sync:") or kind == "device_to_host"


traffic = Traffic()


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return the GPU that the tensor's storage is on, or the CPU."""
    if isinstance(tensor, ShardedTensor) or (tensor.layout != torch.strided and not tensor.is_nested):
        return CPU  # a sharded tensor of a checkpoint has no storage
    block: _Block | None = getattr(tensor.untyped_storage(), "_block", None)
    return CPU if block is None else block.device


def on_device(tensor: torch.Tensor) -> bool:
    """Whether the tensor's storage is on a GPU."""
    return device_of(tensor) is not CPU


def put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Mark the tensor's storage as on this GPU, or on the host; return the tensor."""
    mark(tensor.untyped_storage(), device)
    return tensor


def mark(storage: Any, device: torch.device, size: int | None = None) -> None:
    """Mark a storage as on this GPU, or on the host; it counts as so many bytes for ever, by default as its size."""
    block: _Block | None = getattr(storage, "_block", None)
    if device.type != "cuda":
        if block is not None:
            del storage._block
    elif block is not None and block.device == device:
        block.resize(storage.nbytes())
    elif storage.device.type != "meta":
        storage._block = _Block(device, storage.nbytes() if size is None else size, fixed=size is not None)


def measure(storage: Any) -> None:
    """Correct the counted bytes of a storage that was resized."""
    block: _Block | None = getattr(storage, "_block", None)
    if block is not None:
        block.resize(storage.nbytes())


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
