"""Page-locked host memory that torch's own allocator takes; ``cuda_api.runtime`` counts what is locked in place."""

from __future__ import annotations

import torch


class Pinned:
    """Counts page-locked bytes of torch's allocator.

    Attributes:
        cached: bytes that ``pin_memory=True`` took: torch rounds up to a power of two, and keeps them.
    """

    def __init__(self) -> None:
        self.cached = 0

    def allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that would be in page-locked memory, and return it."""
        size = tensor.untyped_storage().nbytes()
        self.cached += 1 << (size - 1).bit_length() if size else 0
        return tensor


pinned = Pinned()
