"""How the columns of a batch are pickled: as buffers of exactly their elements, without a copy.

``reduce`` takes a tensor apart into a numpy array and what rebuilds the tensor. With protocol 5 and a buffer callback,
as Ray pickles, the array's memory leaves the pickle stream as it is. A buffer that arrives read-only is copied; a
writable one is used as it is, so pass a writable buffer to ``pickle.loads`` only if nothing else uses it. Unpickled
columns are writable and private.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.columns import INTEGER_OF_SIZE, is_tensordict, local_device, make_tensordict
from mcontroller.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments, as ``__reduce__`` returns them."""


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
            once.
    """
    is_array = type(value) is np.ndarray and not value.dtype.hasobject
    if not (is_array or isinstance(value, Tensor) or is_tensordict(value)):
        return value
    if id(value) not in memo:
        rebuild, args = reduce(value, location)
        if rebuild is make_tensordict:
            args = ({key: _pack(column, f"{location}[{key!r}]", memo) for key, column in args[0].items()}, *args[1:])
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
    dense = value.detach().as_subclass(Tensor).resolve_conj().resolve_neg().cpu().contiguous()
    bits = dense.view(INTEGER_OF_SIZE.get(dense.dtype.itemsize, dense.dtype))  # numpy lacks some dtypes
    requires_grad, parameter = value.requires_grad and value.is_leaf, type(value) is torch.nn.Parameter
    return _tensor, (bits.numpy(), dense.dtype, _device_type(value.device), requires_grad, parameter)


def check_sendable(tensor: Tensor, location: str) -> None:
    """Check that a tensor can be sent and saved: it is dense.

    Raises:
        DataError: it is sparse, quantized, nested, on the meta device, or of a wrapper type such as
            DTensor; fields ``location`` and ``kind``.
    """
    if tensor.is_nested:
        kind = "a nested tensor"
    elif type(tensor) not in (Tensor, torch.nn.Parameter):
        kind = type(tensor).__name__
    elif tensor.layout != torch.strided:
        kind = f"a tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        kind = f"a quantized tensor ({tensor.dtype})"
    elif tensor.is_meta:
        kind = "a tensor on the meta device, without values"
    else:
        return
    raise DataError(f"cannot send {location}, which is {kind}: expected a dense tensor", location=location, kind=kind)


def _tensor(array: np.ndarray, dtype: torch.dtype, device: str, requires_grad: bool, parameter: bool) -> Tensor:
    tensor = torch.from_numpy(_private(array)) if array.size else torch.empty(array.shape, dtype=dtype)
    tensor = tensor.view(dtype)
    if device != "cpu":
        tensor = tensor.to(local_device(device))
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _private(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable and array.flags.aligned else array.copy()


def _device_type(device: torch.device | None) -> str | None:
    return None if device is None else device.type
