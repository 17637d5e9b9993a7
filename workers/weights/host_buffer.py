"""Host memory of an exact size that a GPU copies from and to at full speed.

torch's allocator of page-locked memory rounds every tensor up to a power of two, and keeps what it has allocated: 9 GB
take 16. Memory of the usual allocator is locked here instead.
"""

from __future__ import annotations

import weakref

import torch

from mcontroller.errors import ResourceError

__all__ = ["HostBuffer"]

_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs of the process


class HostBuffer:
    """Bytes in host memory, freed with this object.

    Args:
        size: [bytes] its length.
        locked: whether its pages are locked for copies from and to a GPU.

    Attributes:
        bytes: uint8 ``[size]``; use no view of it longer than this object, if it is locked.
        locked: whether its pages are locked.

    Raises:
        ResourceError: CUDA cannot lock the pages.
    """

    def __init__(self, size: int, *, locked: bool) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.locked = locked and size > 0
        if not self.locked:
            return
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), size, _PORTABLE))
        except torch.cuda.CudaError as error:
            raise ResourceError(
                f"CUDA cannot lock {size} bytes of host memory for offloaded parts: {error}; give the node more "
                "memory, or set trainer.offload=never"
            ) from error
        weakref.finalize(self, _unlock, self.bytes).atexit = False  # CUDA may have ended before


def _unlock(locked: torch.Tensor) -> None:
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(locked.data_ptr()))
