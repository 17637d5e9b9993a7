"""Host memory that CUDA copies from and to directly: pages of a file in memory cannot be allocated as pinned ones."""

from __future__ import annotations

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs of the process


def register_memory(memory: torch.Tensor) -> None:
    """Pin the pages of a tensor in host memory until ``unregister_memory``; do nothing without CUDA.

    Raises:
        torch.cuda.CudaError: the pages cannot be pinned, such as beyond the limit of locked memory.
    """
    if torch.cuda.is_available() and memory.nbytes:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))


def unregister_memory(memory: torch.Tensor) -> None:
    """Release the pages of a tensor that was registered, before it is unmapped."""
    if torch.cuda.is_available() and memory.nbytes:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
