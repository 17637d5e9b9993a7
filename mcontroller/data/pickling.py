"""How the columns of a batch are pickled: as buffers of exactly their elements, without a copy.

``reduce`` takes a tensor apart into a numpy array and what rebuilds the tensor. With protocol 5 and a buffer callback,
as Ray pickles, the array's memory leaves the pickle stream as it is. A buffer that arrives read-only is copied; a
writable one is used as it is, so pass a writable buffer to ``pickle.loads`` only if nothing else uses it. Unpickled
columns are writable and private.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import numpy as np
import torch
from torch import Tensor

from mcontroller.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict
    from typing_extensions import TypeIs

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments, as ``__reduce__`` returns them."""

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of each element size in bytes: numpy and torch support it where they lack a dtype of that size."""

_NUMPY_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32}
    | {torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)


class _Placeholder:
    """Stands for a value in a pickle, and is unpickled as the call that rebuilds it."""

    def __init__(self, rebuild: Callable[..., Any], *args: Any) -> None:
        self.reduced: Reduced = rebuild, args

    def __reduce__(self) -> Reduced:
        return self.reduced


class OutOfBand:
    """Base class of batches: pickles tensors and arrays, of its fields and of dicts there, through ``reduce``.

    Values deeper in ``meta_info`` or in arrays of objects are pickled by the pickler: that of a group sends them in the
    same way, and another one as torch and numpy do.
    """

    def __getstate__(self) -> dict[str, Any]:
        memo: dict[int, tuple[_Placeholder, Any]] = {}
        return {
            name: {key: _pack(item, f"{name}[{key!r}]", memo) for key, item in value.items()}
            if type(value) is dict
            else _pack(value, name.removeprefix("local_"), memo)  # ``batch`` is the name that users know
            for name, value in self.__dict__.items()
        }

    def __copy__(self) -> Self:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new


def _pack(value: Any, location: str, memo: dict[int, tuple[_Placeholder, Any]]) -> Any:
    """Return the form of a tensor, TensorDict or numpy array that any pickler sends as ``reduce`` says.

    Args:
        value: a tensor, a TensorDict or an array; any other value, and an array of objects, is returned unchanged.
        location: name of the value in error messages.
        memo: what was packed, by id, with the original, which keeps the id valid: a tensor that occurs twice is sent
            once, and jagged columns keep sharing their offsets.
    """
    is_array = type(value) is np.ndarray and not value.dtype.hasobject
    if not (is_array or isinstance(value, Tensor) or is_tensordict(value)):
        return value
    if id(value) not in memo:
        rebuild, args = reduce(value, location)
        if is_tensordict(value):
            args = ({key: _pack(column, f"{location}[{key!r}]", memo) for key, column in args[0].items()}, *args[1:])
        elif is_jagged(value):
            args = tuple(_pack(part, location, memo) for part in args)
        memo[id(value)] = _Placeholder(rebuild, *args), value
    return memo[id(value)][0]


def reduce(value: Tensor | TensorDict | np.ndarray, location: str = "a tensor") -> Reduced:
    """Reduce a tensor, TensorDict or array for pickling, as a pickler's ``reducer_override`` returns it.

    A view sends its own elements alone. A tensor computed with a gradient arrives detached. A CUDA tensor arrives on
    the receiver's current CUDA device, or on the CPU if the receiver has none.

    Args:
        value: the tensor, TensorDict or array without objects.
        location: name of the value in error messages.

    Returns:
        A function and its arguments, which rebuild the value.

    Raises:
        DataError: if it cannot be sent; see ``check_sendable``.
    """
    if isinstance(value, np.ndarray):
        return _private, (np.ascontiguousarray(value).reshape(value.shape),)
    if not isinstance(value, Tensor):
        return make_tensordict, (dict(value.items()), tuple(value.batch_size), _device_type(value.device))
    check_sendable(value, location)
    if is_jagged(value):
        return make_jagged, packed_parts(value.detach())
    dense = value.detach().as_subclass(Tensor).resolve_conj().resolve_neg().cpu().contiguous()
    bits = dense if dense.dtype in _NUMPY_DTYPES else dense.view(INTEGER_OF_SIZE[dense.dtype.itemsize])
    requires_grad, parameter = value.requires_grad and value.is_leaf, isinstance(value, torch.nn.Parameter)
    return _tensor, (bits.numpy(), dense.dtype, _device_type(value.device), requires_grad, parameter)


def check_sendable(tensor: Tensor, location: str) -> None:
    """Check that a tensor can be sent and saved: it is dense or jagged.

    Raises:
        DataError: it is sparse, quantized, on the meta device, a strided nested tensor, or of a wrapper type such as
            DTensor; fields ``location`` and ``kind``.
    """
    if is_jagged(tensor):
        return
    if type(tensor) not in (Tensor, torch.nn.Parameter) and not _is_memory_mapped(tensor):
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


def _is_memory_mapped(tensor: Tensor) -> bool:
    package = sys.modules.get("tensordict")
    return package is not None and type(tensor) is package.MemoryMappedTensor


def is_tensordict(value: object) -> TypeIs[TensorDict]:
    """Return whether a value is a TensorDict; without the package imported, none is."""
    package = sys.modules.get("tensordict")
    return package is not None and isinstance(value, package.TensorDict)


def _tensor(array: np.ndarray, dtype: torch.dtype, device: str, requires_grad: bool, parameter: bool) -> Tensor:
    tensor = torch.from_numpy(_private(array)) if array.size else torch.empty(array.shape, dtype=dtype)
    tensor = tensor.view(dtype).to(local_device(device))
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _private(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable and array.flags.aligned else array.copy()


def make_tensordict(
    columns: Mapping[str, Any], batch_size: Sequence[int], device: torch.device | str | None = None
) -> TensorDict:
    """Make a TensorDict.

    Args:
        columns: tensors and TensorDicts by name, which begin with ``batch_size``.
        batch_size: the leading dims of all columns.
        device: where all columns are or are moved; of a device type, the local device. None: where they are.
    """
    # On use: importing it takes a second, and checks of Megatron alone run without it.
    from tensordict import TensorDict

    return TensorDict(dict(columns), tuple(batch_size), local_device(device) if isinstance(device, str) else device)


def _device_type(device: torch.device | None) -> str | None:
    return None if device is None else device.type


def local_device(device: str) -> torch.device:
    """Return this process's current device of a type such as "cuda", or the CPU if it has none."""
    module = getattr(torch, device, None)
    return torch.device(device if module is not None and module.is_available() else "cpu")


# ---- jagged columns --------------------------------------------------------------------------------------------------


def is_jagged(column: object) -> TypeGuard[Tensor]:
    """Return whether a column is a nested tensor of layout ``torch.jagged``."""
    return isinstance(column, Tensor) and column.is_nested and column.layout == torch.jagged


def sizes(tensor: Tensor) -> tuple[int | None, ...]:
    """Return the shape of a tensor, with None for a dim whose size differs between rows."""
    return tuple([None if isinstance(size, torch.SymInt) else size for size in tensor.shape])


def packed_parts(column: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the parts of a jagged column, without unused elements.

    Returns:
        The values of all rows next to each other, the offsets ``[batch + 1]`` from 0 to the number of values, and the
        ragged dim.
    """
    if column.lengths() is not None:  # type: ignore[attr-defined]
        column = column.contiguous()
    values: Tensor = column.values()
    offsets: Tensor = column.offsets()  # type: ignore[attr-defined]
    ragged = sizes(column).index(None)
    begin, end = int(offsets[0]), int(offsets[-1])
    if begin:
        offsets = offsets - begin
    if end - begin != values.shape[ragged - 1]:
        values = values.narrow(ragged - 1, begin, end - begin)
    return values, offsets, ragged


def make_jagged(values: Tensor, offsets: Tensor, ragged: int) -> Tensor:
    """Make a jagged column from the parts that ``packed_parts`` returned."""
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged)
