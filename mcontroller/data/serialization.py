"""Pickling at the speed of memory: tensors and arrays leave the pickle stream as buffers of exactly their elements.

``pack`` replaces every tensor and array of a value by a small stand-in. Pickled with protocol 5 and a buffer callback,
as Ray does, a stand-in hands out its memory without a copy when it is contiguous; unpickled, it is the tensor again.
A buffer that arrives read-only, as Ray's shared memory does, is copied, once; one that arrives writable is adopted: to
give a writable buffer to ``pickle.loads`` is to give it away. So what is unpickled can be written and is private.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mcontroller.data import columns
from mcontroller.data.tensordicts import is_memory_mapped, is_tensordict, is_tensordict_itself, make_tensordict
from mcontroller.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]

_ATOMS = frozenset({str, int, float, bool, bytes, complex, type(None)})
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_NUMPY_HAS = frozenset(
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32}
    | {torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)

_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _NUMPY_HAS}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def pack(value: Any) -> Any:
    """``value`` with stand-ins for its tensors and arrays, to be pickled; unpickling gives ``value`` again.

    Looks into dicts, lists, tuples, object arrays and TensorDicts; other objects are left to their own pickling. A
    view brings only its own elements; what was computed with a gradient comes back detached; a CUDA tensor comes back
    on the receiver's current CUDA device, or on the CPU where there is none. Raises DataError naming the place of a
    tensor that cannot travel: sparse, quantized, on the meta device, or of a wrapper type such as DTensor.
    """
    return _Packer().pack(value)


def reduce(value: Tensor | TensorDict, place: str = "a tensor") -> Reduced:
    """The same for one tensor or TensorDict, as a ``reducer_override`` returns it: a function and its arguments."""
    if is_tensordict(value):
        return _tensordict, (dict(value.items()), tuple(value.batch_size), _device(value.device))
    if columns.is_jagged(value):
        return columns.jagged, columns.packed(value.detach())
    check_sendable(value, place)
    plain = value.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    dense = plain.cpu().contiguous()
    bits = dense if dense.dtype in _NUMPY_HAS else dense.view(columns.BITS[dense.dtype.itemsize])
    parameter = isinstance(value, torch.nn.Parameter)
    return _tensor, (
        bits.numpy(),
        dense.dtype,
        _device(value.device),
        value.requires_grad and value.is_leaf,
        parameter,
    )


def check_sendable(tensor: Tensor, place: str) -> None:
    """Raises DataError when ``pack`` could not take the tensor; ``place`` names it in the message."""
    if columns.is_jagged(tensor):
        return
    if type(tensor) not in _PLAIN_TENSORS and not is_memory_mapped(tensor):
        kind = type(tensor).__name__
    elif tensor.is_nested:
        kind = "a nested tensor of strided layout"
    elif tensor.layout != torch.strided:
        kind = f"a tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        kind = f"a quantized tensor ({tensor.dtype})"
    elif tensor.is_meta:
        kind = "a tensor on the meta device, without values,"
    else:
        return
    raise DataError(f"{place} is {kind} and cannot travel: give a dense or a jagged tensor", place=place, kind=kind)


class _StandIn:
    """What a packed value is pickled as: a call that rebuilds it."""

    __slots__ = ("args", "rebuild")

    def __init__(self, rebuild: Callable[..., Any], *args: Any) -> None:
        self.rebuild = rebuild
        self.args = args

    def __reduce__(self) -> Reduced:
        return self.rebuild, self.args


class _ColumnsStandIn:
    """What packed columns are pickled as: one call for all of them, as a call each costs more than a small column."""

    __slots__ = ("held", "source")

    def __init__(self, source: columns.Columns, held: list[Any]) -> None:
        self.source = source
        self.held = held

    def __reduce_ex__(self, protocol: Any) -> Reduced:
        wrap: Callable[[Any], Any] = pickle.PickleBuffer if protocol >= 5 else _bytes
        held = [
            (wrap(np.ascontiguousarray(column)), _NAMES[tensor.dtype], column.shape)
            if type(column) is np.ndarray
            else column
            for column, tensor in zip(self.held, self.source.tensors, strict=True)
        ]
        schema = self.source.schema
        return _columns, (schema.names, schema.inner, _device(schema.device), held, self.source.rows)


class _Packer:
    """One walk over a value; an object met twice is packed once, and is one object again on the other side."""

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
            self._seen[id(value)] = value, value  # what a container that contains itself is packed as
            self._seen[id(value)] = pack(value), value
        return self._seen[id(value)][0]

    def _by_type(self, value: Any, kind: type) -> Callable[[Any], Any] | None:
        if isinstance(value, Tensor):
            return self._tensor
        if kind is np.ndarray:
            return self._objects if value.dtype == object else self._array
        if kind is columns.Columns:
            return self._columns
        if kind is dict:
            return self._dict
        if kind is list or kind is tuple:
            return self._sequence
        if is_tensordict_itself(value):
            return self._tensordict
        return None

    def _inside(self, keyed: Iterable[tuple[Any, Any]]) -> list[Any]:
        packed = []
        for key, item in keyed:
            self._path.append(key)
            packed.append(self.pack(item))
            self._path.pop()
        return packed

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        return dict(zip(value, self._inside(value.items()), strict=True))

    def _sequence(self, value: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
        if _ATOMS.issuperset(map(type, value)):
            return value
        return type(value)(self._inside(enumerate(value)))

    def _objects(self, value: np.ndarray) -> np.ndarray:
        if _ATOMS.issuperset(map(type, value.flat)):
            return value
        packed = np.empty(value.size, dtype=object)
        for place, item in enumerate(self._inside(enumerate(value.flat))):
            packed[place] = item
        return packed.reshape(value.shape)

    def _array(self, value: np.ndarray) -> Any:
        if value.dtype.hasobject:
            return value
        return _StandIn(_private, np.ascontiguousarray(value).reshape(value.shape))

    def _tensordict(self, value: TensorDict) -> _StandIn:
        rebuild, (items, *rest) = reduce(value)
        return _StandIn(rebuild, self._dict(items), *rest)

    def _columns(self, value: columns.Columns) -> _ColumnsStandIn:
        if len(set(map(id, value.tensors))) < len(value.tensors):  # a tensor of two names stays one tensor
            return _ColumnsStandIn(value, self._inside(value.items()))
        return _ColumnsStandIn(value, [self._column(*item) for item in value.items()])

    def _column(self, name: str, column: Any) -> Any:
        """The array of a column that is an ordinary tensor, which is most; what stands in for any other."""
        if type(column) is Tensor and column.dtype in _NUMPY_HAS:
            with suppress(RuntimeError, TypeError):  # on another device, with a gradient, sparse, ...
                return column.numpy()
        (packed,) = self._inside([(name, column)])
        return packed

    def _tensor(self, value: Tensor) -> _StandIn:
        rebuild, args = reduce(value, "value" + "".join(f"[{key!r}]" for key in self._path))
        return _StandIn(rebuild, *(map(self.pack, args) if columns.is_jagged(value) else args))


def _private(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable and array.flags.aligned else array.copy()


def _device(device: torch.device | None) -> str | None:
    return None if device is None else device.type


def _tensor(array: np.ndarray, dtype: torch.dtype, device: str, requires_grad: bool, parameter: bool) -> Tensor:
    tensor = torch.from_numpy(_private(array)) if array.size else torch.empty(array.shape, dtype=dtype)
    tensor = tensor.view(dtype).to(_here(device))
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _tensordict(items: Mapping[str, Any], batch_size: tuple[int, ...], device: str | None) -> TensorDict:
    return make_tensordict(items, batch_size, None if device is None else _here(device))


def _columns(
    names: tuple[str, ...], inner: tuple[int, ...], device: str | None, held: Sequence[Any], rows: int
) -> columns.Columns:
    columns_ = tuple([_of_buffer(*column) if type(column) is tuple else column for column in held])
    here = None if device is None else _here(device)
    if {tuple}.issuperset(map(type, held)):
        schema = columns.Schema.of(names, inner, here, tuple([(_DTYPES[dtype], shape[1:]) for _, dtype, shape in held]))
    else:
        schema = columns.Schema(names, inner, here)
    return columns.Columns(schema, columns_, rows, columns.Unread in set(map(type, columns_)))


def _bytes(array: np.ndarray) -> bytes:
    return array.tobytes()


def _of_buffer(content: Any, dtype: str, shape: tuple[int, ...]) -> Tensor | columns.Unread:
    view, kind = memoryview(content), _DTYPES[dtype]
    if not view.nbytes:
        return torch.empty(shape, dtype=kind)
    if view.readonly:
        return columns.Unread(np.frombuffer(view, dtype).reshape(shape), kind)
    return torch.frombuffer(view, dtype=kind).view(shape)


def _here(device: str) -> torch.device:
    """The receiver's own device of the type, the CPU where it has none."""
    module = getattr(torch, device, None)
    return torch.device(device if module is not None and module.is_available() else "cpu")


class OutOfBand:
    """Makes a class's instances pickle through ``pack``; copying them stays free of it."""

    def __getstate__(self) -> dict[str, Any]:
        return pack(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __copy__(self) -> Any:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new
