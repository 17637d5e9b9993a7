"""What travels between processes: a value as one small pickle, and its large buffers beside it, never inside.

Ray stores the buffers of a ``Packed`` as they are and maps them into every reader, so a value is serialized once
and written once. The reader gets memory of its own (``Packed.unpack``), which it may write into. Tensors travel as
their own bytes, whatever their dtype; object references and actor handles inside a value stay under Ray's counting.
"""

from __future__ import annotations

import io
import pickle
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray import cloudpickle
from ray.actor import ActorHandle

from mcontroller.ray.memory import private_copies

__all__ = ["INLINE_BYTES", "IN_BAND_BYTES", "Packed", "carried", "pack", "unpack"]

INLINE_BYTES = 64 * 1024
"""A value up to this size goes inline with the task that reads it, below Ray's own limit of 100 KiB a task."""

IN_BAND_BYTES = 1024
"""Below this size a buffer costs more than a copy of it inside the pickle."""

_PLAIN = (type(None), bool, int, float)

_arriving: ContextVar[tuple[list[Any], list[Any]]] = ContextVar("_arriving")


@dataclass(slots=True)
class Packed:
    """A pickled value: ``data`` without its buffers, ``buffers`` out of band, ``held`` the Ray handles inside it."""

    data: bytes
    buffers: list[Any]
    held: list[Any]

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    @property
    def large(self) -> bool:
        """Whether it is worth a place in the object store, instead of going inline."""
        return self.nbytes > INLINE_BYTES

    def as_argument(self) -> Any:
        """What to pass to any number of tasks: a ref to its one copy in the store, or bytes, which Ray does not pickle.

        A small value that holds handles is passed as it is, for Ray to count them.
        """
        if self.large:
            return ray.put(self)
        return self if self.held else self.inline()

    def inline(self) -> bytes:
        """All of it as bytes, the buffers copied."""
        return pickle.dumps((self.data, [bytearray(memoryview(buffer)) for buffer in self.buffers]), protocol=5)

    def unpack(self) -> Any:
        """The value, in memory that only this process sees."""
        return _load(self.data, private_copies(self.buffers), self.held)


def _load(data: bytes, buffers: list[Any], held: list[Any]) -> Any:
    token = _arriving.set((buffers, held))
    try:
        return pickle.loads(data)
    finally:
        _arriving.reset(token)


def carried(value: Any) -> Any:
    """``value`` as a task gives it back: plain, or as bytes while it is small, or as a ``Packed``; see ``unpack``."""
    packed = pack(value)
    return packed if not isinstance(packed, Packed) or packed.large or packed.held else packed.inline()


def pack(value: Any) -> Any:
    """``value`` ready to travel: a ``Packed``, or itself where it is a plain number, None or a bool.

    Raises DataError for a tensor that cannot travel (sparse, quantized), before anything is sent.
    """
    if isinstance(value, _PLAIN):
        return value
    sink = io.BytesIO()
    pickler = _Pickler(sink, protocol=5)
    pickler.dump(value)
    return Packed(sink.getvalue(), pickler.buffers, pickler.held)


def unpack(value: Any) -> Any:
    """The value that was carried or packed, in memory that only this process sees."""
    if isinstance(value, bytes):
        data, buffers = pickle.loads(value)
        return _load(data, buffers, [])
    return value.unpack() if isinstance(value, Packed) else value


class _Pickler(cloudpickle.Pickler):
    """Takes arrays, tensors and Ray handles out of the stream; all else is pickled as Ray itself would."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffers: list[Any] = []
        self.held: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and obj.nbytes >= IN_BAND_BYTES and not obj.dtype.hasobject:
            content: Any = np.ascontiguousarray(obj).reshape(-1).view(np.uint8)
            self.buffers.append(pickle.PickleBuffer(content))
            return _array_at, (len(self.buffers) - 1, obj.dtype, obj.shape)
        if isinstance(obj, ray.ObjectRef | ActorHandle):
            self.held.append(obj)
            return _handle_at, (len(self.held) - 1,)
        if _holds_tensors(obj):
            from mcontroller import serialization  # loads torch, which whoever holds a tensor has loaded

            return serialization.reduce(obj)
        return super().reducer_override(obj)


def _holds_tensors(obj: Any) -> bool:
    torch, tensordict = sys.modules.get("torch"), sys.modules.get("tensordict")
    if torch is not None and isinstance(obj, torch.Tensor):
        return True
    return tensordict is not None and type(obj) is tensordict.TensorDict


def _array_at(index: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(_arriving.get()[0][index], dtype=dtype).reshape(shape)


def _handle_at(index: int) -> Any:
    return _arriving.get()[1][index]
