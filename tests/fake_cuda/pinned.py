"""Page-locked host memory: what torch's own allocator takes, and memory of others that ``cudart`` locks in place."""

from __future__ import annotations

import torch

from tests.fake_cuda.streams import in_flight


class Pinned:
    """Counts page-locked bytes of torch's allocator.

    Attributes:
        cached: bytes that ``pin_memory=True`` took: torch rounds up to a power of two, and keeps them.
    """

    def __init__(self) -> None:
        self.cached = 0

    def allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that would be in page-locked memory, and return it."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self.cached += 1 << (size - 1).bit_length() if size else 0
        storage._pinned = True
        return tensor


pinned = Pinned()


class Runtime:
    """The functions of ``torch.cuda.cudart()`` that pin memory which exists already.

    Attributes:
        registered: bytes by address.
        most: the most bytes at one time.
        count: how often memory was registered.
    """

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.most = self.count = 0

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        """Register memory; 712 is cudaErrorHostMemoryAlreadyRegistered."""
        if pointer in self.registered:
            return 712
        self.registered[pointer] = size
        self.count += 1
        self.most = max(self.most, sum(self.registered.values()))
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        """Release memory; 713 is cudaErrorHostMemoryNotRegistered."""
        size = self.registered.pop(pointer, None)
        in_flight.release(pointer, size or 0)
        return 713 if size is None else 0


runtime = Runtime()


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the host is in page-locked memory."""
    if getattr(tensor.untyped_storage(), "_pinned", False):
        return True
    start = tensor.data_ptr()
    return any(first <= start < first + size for first, size in runtime.registered.items())
