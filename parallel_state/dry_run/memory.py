"""The memory of a rank's device: the bytes of its storages by kind, their peak, and where it was reached."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from parallel_state.hangs.lines import calling_position, source_line

KINDS = ("parameters", "gradients", "optimizer", "activations", "communication")
"""What storages are for. Communication: the results of collectives and what other stages sent."""
_NEXT_PLACE = 1.001  # a place is noted again when the peak has grown by this factor


class Storage:
    """The bytes of one storage; they are free when torch deletes the storage, of which this is an attribute.

    Args:
        memory: the memory that it is in.
        size: bytes.
    """

    __slots__ = ("kind", "memory", "size")

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory, self.size, self.kind = memory, size, memory.kind
        memory.add(size, self.kind)

    def resize(self, size: int) -> None:
        """Change the size."""
        self.memory.add(size - self.size, self.kind)
        self.size = size

    def change_kind(self, kind: str) -> None:
        """Count the bytes as another kind."""
        self.memory.by_kind[self.kind] -= self.size
        self.memory.by_kind[kind] += self.size
        self.kind = kind

    def __del__(self) -> None:
        self.memory.now -= self.size
        self.memory.by_kind[self.kind] -= self.size


class Memory:
    """The storages of one rank.

    Attributes:
        kind: of new storages.
        now: bytes of all storages.
        by_kind: bytes of the storages of each kind.
        peak: the most bytes since ``reset_peak``.
        peak_by_kind: the bytes of each kind then.
        module: the innermost module that ran at the peak; None outside of modules.
        line: the line of the program that ran then; empty if none is known.
    """

    def __init__(self) -> None:
        self.kind = "activations"
        self.now = 0
        self.by_kind: Counter[str] = Counter()
        self.peak = 0
        self.peak_by_kind: dict[str, int] = {}
        self._next_place = 0.0
        self.module: torch.nn.Module | None = None
        self.line = ""

    def add(self, size: int, kind: str) -> None:
        """Count bytes of a new storage."""
        self.now += size
        self.by_kind[kind] += size
        if self.now > self.peak:
            self.peak, self.peak_by_kind = self.now, dict(self.by_kind)
            if self.now > self._next_place:
                self._next_place = self.now * _NEXT_PLACE
                self._note_place()

    def reset_peak(self) -> None:
        """Begin to look for the peak again."""
        self.peak, self.peak_by_kind = self.now, dict(self.by_kind)
        self._next_place = float(self.now)
        self.module, self.line = None, ""

    def change_kind(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Count the storages of tensors as another kind."""
        for tensor in tensors:
            storage = storage_of(tensor) if tensor is not None else None
            if storage is not None and storage.memory is self:
                storage.change_kind(kind)

    def _note_place(self) -> None:
        frame: Any = sys._getframe(2)
        place = source_line(*calling_position(frame))
        self.line, self.module = place.through or place.line, None
        while frame is not None and self.module is None:
            if frame.f_code.co_varnames[:1] == ("self",):
                owner = frame.f_locals["self"]
                self.module = owner if isinstance(owner, torch.nn.Module) else None
            frame = frame.f_back


def storage_of(tensor: torch.Tensor) -> Storage | None:
    """Return the counted storage of a tensor; None if it is not counted."""
    return getattr(tensor.untyped_storage(), "counted", None)
