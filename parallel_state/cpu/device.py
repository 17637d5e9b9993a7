"""The device that stands for the GPU in this process: the CPU, or torch's ``meta`` device, which has no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_CPU, _META = torch.device("cpu"), torch.device("meta")


class Device:
    """The device that rewritten sources name where they named CUDA.

    Attributes:
        type: ``"cpu"`` or ``"meta"``.
    """

    def __init__(self) -> None:
        self.type = "cpu"

    @property
    def has_memory(self) -> bool:
        """Whether tensors have values."""
        return self.type == "cpu"

    @property
    def tensors(self) -> str:
        """What the names of its tensors' types begin with."""
        return "torch." if self.has_memory else "torch.meta."

    @property
    def torch(self) -> torch.device:
        """The device as torch's object."""
        return _CPU if self.has_memory else _META


current = Device()
"""Rewritten sources read it when they run, so that one process can use both devices, one after the other."""


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Return a context manager in which ``meta`` stands for the GPU: its tensors have shapes and no values."""
    before = current.type
    current.type = "meta"
    try:
        yield
    finally:
        current.type = before
