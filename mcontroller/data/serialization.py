"""Pickle batches at memory speed: tensors and arrays leave the pickle stream as buffers of exactly their elements.

``pack_tensors`` replaces every tensor and array of a value by a small placeholder. Pickled with protocol 5 and a buffer
callback, as Ray does, a placeholder exposes its memory without a copy if it is contiguous. Unpickled, it is the
tensor again. A buffer that arrives read-only, as from Ray's shared memory, is copied once; a writable one is used as it
is, so pass a writable buffer to ``pickle.loads`` only if nothing else uses it. Unpickled values are writable and
private.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.columns import Columns, Schema, Unread, is_jagged, make_jagged, packed_parts
from mcontroller.data.rows import INTEGER_OF_SIZE
from mcontroller.data.tensordicts import is_memory_mapped, is_tensordict, is_tensordict_itself, make_tensordict
from mcontroller.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments, as ``__reduce__`` returns them."""

_ATOMS = frozenset({str, int, float, bool, bytes, complex, type(None)})
_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
_NUMPY_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32}
    | {torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)
"""Dtypes that numpy has too; others travel as integers of the same size."""

_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _NUMPY_DTYPES}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def pack_tensors(value: Any) -> Any:
    """Replace the tensors and arrays of a value by placeholders, to be pickled; unpickling returns the value again.

    Looks into dicts, lists, tuples, object arrays and TensorDicts; other objects keep their own pickling. A view sends
    only its own elements. A tensor computed with a gradient arrives detached. A CUDA tensor arrives on the receiver's
    current CUDA device, or on the CPU if the receiver has none.

    Raises:
        DataError: if a tensor cannot be sent (sparse, quantized, on the meta device, or of a wrapper type such as
            DTensor); the message and the field ``location`` name it.
    """
    return _Packer().pack(value)


def reduce(value: Tensor | TensorDict, location: str = "a tensor") -> Reduced:
    """Reduce one tensor or TensorDict for pickling, as a pickler's ``reducer_override`` returns it.

    Args:
        value: the tensor or TensorDict.
        location: name of the value in error messages.

    Returns:
        A function and its arguments, which rebuild the value.

    Raises:
        DataError: if it cannot be sent, see ``pack_tensors``.
    """
    if is_tensordict(value):
        return _tensordict, (dict(value.items()), tuple(value.batch_size), _device_type(value.device))
    if is_jagged(value):
        return make_jagged, packed_parts(value.detach())
    check_sendable(value, location)
    plain = value.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    dense = plain.cpu().contiguous()
    bits = dense if dense.dtype in _NUMPY_DTYPES else dense.view(INTEGER_OF_SIZE[dense.dtype.itemsize])
    parameter = isinstance(value, torch.nn.Parameter)
    requires_grad = value.requires_grad and value.is_leaf
    return _tensor, (bits.numpy(), dense.dtype, _device_type(value.device), requires_grad, parameter)


def check_sendable(tensor: Tensor, location: str) -> None:
    """Check that ``pack_tensors`` can send a tensor.

    Args:
        tensor: the tensor.
        location: name of the tensor in the error message.

    Raises:
        DataError: if it cannot; fields ``location`` and ``kind``.
    """
    if is_jagged(tensor):
        return
    if type(tensor) not in _TENSOR_TYPES and not is_memory_mapped(tensor):
        kind = type(tensor).__name__
    elif tensor.is_nested:
        kind = "a nested tensor of strided layout"
    elif tensor.layout != torch.strided:
        kind = f"a tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        kind = f"a quantized tensor ({tensor.dtype})"
    elif tensor.is_meta:
        kind = "a tensor on the meta device, without values"
    else:
        return
    raise DataError(
        f"cannot send {location}, which is {kind}: expected a dense or jagged tensor", location=location, kind=kind
    )


class _Placeholder:
    """Pickles as a call that rebuilds a tensor or array."""

    __slots__ = ("args", "rebuild")

    def __init__(self, rebuild: Callable[..., Any], *args: Any) -> None:
        self.rebuild = rebuild
        self.args = args

    def __reduce__(self) -> Reduced:
        return self.rebuild, self.args


class _ColumnsPlaceholder:
    """Pickles as one call that rebuilds all columns, because one call per column costs more than a small column."""

    __slots__ = ("packed", "source")

    def __init__(self, source: Columns, packed: list[Any]) -> None:
        self.source = source
        self.packed = packed

    def __reduce_ex__(self, protocol: Any) -> Reduced:
        wrap: Callable[[Any], Any] = pickle.PickleBuffer if protocol >= 5 else _bytes
        packed = [
            (wrap(np.ascontiguousarray(column)), _NAMES[tensor.dtype], column.shape)
            if type(column) is np.ndarray
            else column
            for column, tensor in zip(self.packed, self.source.tensors, strict=True)
        ]
        schema = self.source.schema
        return _columns, (schema.names, schema.inner, _device_type(schema.device), packed, self.source.rows)


class _Packer:
    """One walk over a value. An object that occurs twice is packed once, and is again one object after unpickling."""

    def __init__(self) -> None:
        self._path: list[Any] = []
        self._seen: dict[int, tuple[Any, Any]] = {}  # id -> packed, and the object, kept alive while its id is a key

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        pack = self._by_type(value, kind)
        if pack is None:
            return value
        if id(value) not in self._seen:
            self._seen[id(value)] = value, value  # for a container that contains itself
            self._seen[id(value)] = pack(value), value
        return self._seen[id(value)][0]

    def _by_type(self, value: Any, kind: type) -> Callable[[Any], Any] | None:
        if isinstance(value, Tensor):
            return self._tensor
        if kind is np.ndarray:
            return self._objects if value.dtype == object else self._array
        if kind is Columns:
            return self._columns
        if kind is dict:
            return self._dict
        if kind is list or kind is tuple:
            return self._sequence
        if is_tensordict_itself(value):
            return self._tensordict
        return None

    def _items(self, keyed: Iterable[tuple[Any, Any]]) -> list[Any]:
        packed = []
        for key, item in keyed:
            self._path.append(key)
            packed.append(self.pack(item))
            self._path.pop()
        return packed

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        return dict(zip(value, self._items(value.items()), strict=True))

    def _sequence(self, value: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
        if _ATOMS.issuperset(map(type, value)):
            return value
        return type(value)(self._items(enumerate(value)))

    def _objects(self, value: np.ndarray) -> np.ndarray:
        if _ATOMS.issuperset(map(type, value.flat)):
            return value
        packed = np.empty(value.size, dtype=object)
        for index, item in enumerate(self._items(enumerate(value.flat))):
            packed[index] = item
        return packed.reshape(value.shape)

    def _array(self, value: np.ndarray) -> Any:
        if value.dtype.hasobject:
            return value
        return _Placeholder(_private, np.ascontiguousarray(value).reshape(value.shape))

    def _tensordict(self, value: TensorDict) -> _Placeholder:
        rebuild, (items, *rest) = reduce(value)
        return _Placeholder(rebuild, self._dict(items), *rest)

    def _columns(self, value: Columns) -> _ColumnsPlaceholder:
        if len(set(map(id, value.tensors))) < len(value.tensors):  # a tensor of two names stays one tensor
            return _ColumnsPlaceholder(value, self._items(value.items()))
        return _ColumnsPlaceholder(value, [self._column(*item) for item in value.items()])

    def _column(self, name: str, column: Any) -> Any:
        """Return the array of an ordinary tensor, as most columns are, and a placeholder for any other."""
        if type(column) is Tensor and column.dtype in _NUMPY_DTYPES:
            with suppress(RuntimeError, TypeError):  # on another device, with a gradient, sparse, ...
                return column.numpy()
        (packed,) = self._items([(name, column)])
        return packed

    def _tensor(self, value: Tensor) -> _Placeholder:
        rebuild, args = reduce(value, "value" + "".join(f"[{key!r}]" for key in self._path))
        return _Placeholder(rebuild, *(map(self.pack, args) if is_jagged(value) else args))


def _private(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable and array.flags.aligned else array.copy()


def _device_type(device: torch.device | None) -> str | None:
    return None if device is None else device.type


def _tensor(array: np.ndarray, dtype: torch.dtype, device: str, requires_grad: bool, parameter: bool) -> Tensor:
    tensor = torch.from_numpy(_private(array)) if array.size else torch.empty(array.shape, dtype=dtype)
    tensor = tensor.view(dtype).to(local_device(device))
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _tensordict(items: Mapping[str, Any], batch_size: tuple[int, ...], device: str | None) -> TensorDict:
    return make_tensordict(items, batch_size, None if device is None else local_device(device))


def _columns(
    names: tuple[str, ...], inner: tuple[int, ...], device: str | None, packed: Sequence[Any], rows: int
) -> Columns:
    columns = tuple([_of_buffer(*column) if type(column) is tuple else column for column in packed])
    local = None if device is None else local_device(device)
    if {tuple}.issuperset(map(type, packed)):
        kinds = tuple([(_DTYPES[dtype], shape[1:]) for _, dtype, shape in packed])
        schema = Schema.of(names, inner, local, kinds)
    else:
        schema = Schema(names, inner, local)
    return Columns(schema, columns, rows, Unread in set(map(type, columns)))


def _bytes(array: np.ndarray) -> bytes:
    return array.tobytes()


def _of_buffer(content: Any, dtype: str, shape: tuple[int, ...]) -> Tensor | Unread:
    view, kind = memoryview(content), _DTYPES[dtype]
    if not view.nbytes:
        return torch.empty(shape, dtype=kind)
    if view.readonly:
        return Unread(np.frombuffer(view, dtype).reshape(shape), kind)
    return torch.frombuffer(view, dtype=kind).view(shape)


def local_device(device: str) -> torch.device:
    """Return this process's current device of a type such as "cuda", or the CPU if it has none."""
    module = getattr(torch, device, None)
    return torch.device(device if module is not None and module.is_available() else "cpu")


class OutOfBand:
    """Base class whose instances are pickled through ``pack_tensors``; copying them is not affected."""

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = pack_tensors(self.__dict__)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __copy__(self) -> Self:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new
