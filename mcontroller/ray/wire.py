"""What travels between processes: a value as one small pickle, and its large buffers beside it, never inside.

Ray stores the buffers of a ``Packed`` as they are and maps them into every reader, so a value is serialized once
and written once. The reader gets memory of its own (``Packed.unpack``), which it may write into. Tensors travel as
their own bytes, whatever their dtype; object references and actor handles inside a value stay under Ray's counting.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import ray
from ray import cloudpickle
from ray.actor import ActorHandle

from mcontroller.data.tensordicts import is_tensordict_itself
from mcontroller.ray.memory import private_copies

__all__ = ["INLINE_BYTES", "IN_BAND_BYTES", "Packed", "carried", "opened", "pack", "unpack"]

INLINE_BYTES = 64 * 1024
"""A value up to this size goes inline with the task that reads it, below Ray's own limit of 100 KiB a task."""

IN_BAND_BYTES = 1024
"""Below this size a buffer costs more than a copy of it inside the pickle."""

_PLAIN = (type(None), bool, int, float)

_arriving: ContextVar[list[Any]] = ContextVar("_arriving")


class Packed(NamedTuple):
    """A pickled value: ``data`` without its buffers, ``buffers`` out of band, ``held`` the Ray handles inside it.

    ``head``, of plain values, is what the reader has to know before it reads the value.
    """

    data: bytes
    buffers: list[Any]
    held: list[Any]
    head: tuple[Any, ...] = ()

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
        return self if self.held else pickle.dumps((self.head, self.data, self._copied()), 5)

    def inline(self) -> bytes:
        """All of it but the head as bytes, the buffers copied."""
        return pickle.dumps(self._replace(buffers=self._copied()), 5) if self.buffers else self.data

    def _copied(self) -> list[bytearray]:
        return [bytearray(memoryview(buffer)) for buffer in self.buffers]

    def unpack(self, shared: bool = False) -> Any:
        """The value, in memory that only this process sees; ``shared`` leaves the columns of batches ``Unread``."""
        views = [memoryview(buffer).toreadonly() for buffer in self.buffers]
        return _load(self.data, views if shared else private_copies(views), self.held)


def _load(data: bytes, buffers: list[Any], held: list[Any]) -> Any:
    if not held:
        return pickle.loads(data, buffers=buffers)
    token = _arriving.set(held)
    try:
        return pickle.loads(data, buffers=buffers)
    finally:
        _arriving.reset(token)


def opened(argument: Any) -> tuple[tuple[Any, ...], Callable[[], Any]]:
    """The head of what ``as_argument`` made, and what reads the value, in memory that only this process sees."""
    if isinstance(argument, bytes):
        head, data, buffers = pickle.loads(argument)
        return head, partial(_load, data, buffers, [])
    return argument.head, argument.unpack


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
    pickler = _Pickler(sink)
    pickler.dump(value)
    return Packed(sink.getvalue(), pickler.buffers, pickler.held)


def unpack(value: Any, *, shared: bool = False) -> Any:
    """The value that was carried or packed, in memory that only this process sees; ``shared`` as in ``Packed``."""
    if isinstance(value, bytes):
        inside = pickle.loads(value)
        return _load(inside.data, inside.buffers, []) if isinstance(inside, Packed) else inside
    return value.unpack(shared) if isinstance(value, Packed) else value


class _Pickler(cloudpickle.Pickler):
    """Takes buffers and Ray handles out of the stream; all else is pickled as Ray itself would."""

    def __init__(self, sink: io.BytesIO) -> None:
        self.buffers: list[Any] = []
        self.held: list[Any] = []
        super().__init__(sink, protocol=5, buffer_callback=partial(_stays, self.buffers))

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is FunctionType or kind is type:  # nearly always one of our own, which are there by name
            return NotImplemented if obj.__module__.startswith(_OWN) else super().reducer_override(obj)
        if kind is np.ndarray and not obj.dtype.hasobject:
            content: Any = np.ascontiguousarray(obj).reshape(-1).view(np.uint8)
            return _array, (pickle.PickleBuffer(content), obj.dtype, obj.shape)
        if isinstance(obj, _HANDLES):
            self.held.append(obj)
            return _handle_at, (len(self.held) - 1,)
        if _holds_tensors(obj):
            from mcontroller.data import serialization  # loads torch, which whoever holds a tensor has loaded

            return serialization.reduce(obj)
        return super().reducer_override(obj)


def _stays(buffers: list[Any], buffer: pickle.PickleBuffer) -> bool:
    """Whether a buffer is to stay in the stream; others go to ``buffers``."""
    small = memoryview(buffer).nbytes < IN_BAND_BYTES
    if not small:
        buffers.append(buffer)
    return small


_HANDLES = (ray.ObjectRef, ActorHandle)
_OWN = "mcontroller."


def _holds_tensors(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return (torch is not None and isinstance(obj, torch.Tensor)) or is_tensordict_itself(obj)


def _array(content: Any, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    view = memoryview(content)
    writable = bytearray(view) if view.readonly else view
    return np.frombuffer(writable, dtype=dtype).reshape(shape)


def _handle_at(index: int) -> Any:
    return _arriving.get()[index]
