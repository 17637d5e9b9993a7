"""The unique ids of GPUs, which are the same in all processes, as their indices are not."""

from __future__ import annotations

import torch

__all__ = ["gpu_id", "visible_gpus"]


def gpu_id(device: torch.device | int) -> str:
    """Return the UUID of a GPU that this process can use."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_gpus() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process can use, by index; none without CUDA."""
    return tuple(map(gpu_id, range(torch.cuda.device_count()))) if torch.cuda.is_available() else ()
