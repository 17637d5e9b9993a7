"""A pipe in place of vLLM's NCCL communicator, and its packing functions without CUDA streams."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer import packed_tensor


class Pipe:
    """The ``broadcast`` of one sender and one receiver.

    Args:
        path: of a named pipe; opening it waits for the other side.
        sends: which side this is.
    """

    def __init__(self, path: str, *, sends: bool) -> None:
        self.file = open(path, "wb" if sends else "rb", buffering=0)  # noqa: SIM115
        self.sends = sends

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        left = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        while left:
            count = self.file.write(left) if self.sends else self.file.readinto(left)  # type: ignore[attr-defined]
            if not count:
                raise EOFError("the other side of the pipe has closed it")
            left = left[count:]

    def destroy(self) -> None:
        self.file.close()


class _Stream:
    def synchronize(self) -> None:
        pass


def run_without_cuda(patch: Any = setattr) -> None:
    """Let vLLM's packing functions run on a CPU: without streams, and with nothing to wait for."""
    patch(packed_tensor, "_get_streams", lambda device, count: (_Stream(),) * count)
    patch(torch.accelerator, "current_device_index", lambda: 0)
    patch(torch.accelerator, "synchronize", lambda *args: None)
