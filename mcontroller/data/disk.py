"""Save a batch to a file without pickle: one safetensors file with a JSON description among its tensors.

Tensors and numeric arrays, at any depth, are tensors of the file; the description refers to them by number. Everything
else must be a JSON value, a tuple, or a numpy number. Loading builds only these types, so a file from an unknown source
cannot run code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.columns import is_tensordict, make_tensordict
from mcontroller.data.pickling import check_sendable
from mcontroller.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

_DESCRIPTION = "description"
_FORMAT = "mcontroller.DataProto"
_VERSION = 1
_MARK = "$"
"""A dict with one key that starts with this mark encodes a value of a type that JSON does not have."""

_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32}
    | {torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.float8_e4m3fn, torch.float8_e5m2}
)

_WIDEST_EMPTY = 4096
"""[characters] Width of an array of shorter strings that is still accepted: a damaged one could take all memory."""

Parts = tuple[Any, dict[str, np.ndarray], dict[str, Any]]
"""The tensors, the non-tensor columns and the meta_info of a batch."""


def save_batch(
    filepath: str | os.PathLike[str],
    batch: TensorDict | None,
    non_tensor_batch: dict[str, np.ndarray],
    meta_info: dict[str, Any],
) -> None:
    """Write the three parts of a batch; the file gets its name only when it is complete.

    Raises:
        DataError: if a value cannot be stored in such a file; names the column or key, and the type.
        OSError: if the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file  # on use: a program that saves no batch needs no safetensors

    writer = _Writer()
    description = {
        "format": _FORMAT,
        "version": _VERSION,
        "batch": writer.encode(batch, "batch"),
        "non_tensor_batch": writer.encode(non_tensor_batch, "non_tensor_batch"),
        "meta_info": writer.encode(meta_info, "meta_info"),
    }
    text = json.dumps(description).encode()  # of ASCII alone: texts may have half of a surrogate pair
    writer.tensors[_DESCRIPTION] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    target = Path(filepath)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        save_file(writer.tensors, temporary)
        temporary.replace(target)
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"cannot write {filepath}: {error}") from error


def load_batch(filepath: str | os.PathLike[str]) -> Parts:
    """Read the three parts of the batch that ``save_batch`` wrote, onto the CPU.

    Raises:
        DataError: if the file is not a safetensors file, contains no batch, is damaged, or was written by another
            version.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(filepath)
    except SafetensorError as error:
        raise DataError(f"{os.fspath(filepath)} is not a safetensors file: {error}", path=filepath) from error
    except OSError as error:
        if os.path.isdir(filepath):
            raise IsADirectoryError(
                f"{os.fspath(filepath)} is a directory, not a file that save_to_disk wrote"
            ) from error
        raise
    if _DESCRIPTION not in tensors:
        raise DataError(f"{os.fspath(filepath)} is not a saved DataProto: it has no {_DESCRIPTION!r}", path=filepath)
    try:
        description = json.loads(tensors[_DESCRIPTION].numpy().tobytes())
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(filepath, f"its description is not JSON: {error}") from error
    if not isinstance(description, dict):
        raise _damaged(filepath, f"its description is {type(description).__name__}, expected an object")
    if (description.get("format"), description.get("version")) != (_FORMAT, _VERSION):
        raise DataError(
            f"{os.fspath(filepath)} is {description.get('format')!r} version {description.get('version')!r}: "
            f"expected {_FORMAT!r} version {_VERSION}",
            path=filepath,
        )
    reader = _Reader(tensors)
    try:
        batch, arrays, info = (reader.decode(description[name]) for name in ("batch", "non_tensor_batch", "meta_info"))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, RuntimeError, MemoryError) as error:
        if isinstance(error, DataError):
            raise
        raise _damaged(filepath, f"{type(error).__name__}: {error}") from error
    for name, value, kind in (("non_tensor_batch", arrays, np.ndarray), ("meta_info", info, object)):
        if not isinstance(value, dict) or not all(isinstance(item, kind) for item in value.values()):
            raise _damaged(filepath, f"{name} is {value!r:.100}, expected columns by name")
    if batch is not None and not is_tensordict(batch):
        raise _damaged(filepath, f"batch is {type(batch).__name__}, expected tensors by name")
    return batch, arrays, info


def _damaged(filepath: str | os.PathLike[str], reason: str) -> DataError:
    return DataError(f"{os.fspath(filepath)} is a damaged file of a DataProto: {reason:.300}", path=filepath)


class _Writer:
    """Encodes values as JSON, and collects their tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._memory: set[int] = set()

    def encode(self, value: Any, location: str) -> Any:
        if value is None or type(value) in (str, bool, int, float):
            return value
        if type(value) is dict:
            return self._dict(value, location)
        if type(value) is list:
            return [self.encode(item, f"{location}[{index}]") for index, item in enumerate(value)]
        if type(value) is tuple:
            return {"$tuple": [self.encode(item, f"{location}[{index}]") for index, item in enumerate(value)]}
        if is_tensordict(value):
            return {"$tensordict": [self._dict(dict(value.items()), location), list(value.batch_size)]}
        if isinstance(value, Tensor):
            return self._tensor(value, location)
        if isinstance(value, np.ndarray):
            return self._array(value, location)
        if isinstance(value, np.bool_ | np.number):
            return {"$number": self._array(np.asarray(value), location)}
        raise DataError(
            f"cannot save {location}, which is {type(value).__name__}: "
            "expected numbers, strings, lists, tuples, dicts, arrays and tensors",
            location=location,
            type=type(value).__name__,
        )

    def _dict(self, value: dict[Any, Any], location: str) -> dict[str, Any]:
        items = [(key, self.encode(item, f"{location}[{key!r}]")) for key, item in value.items()]
        if all(type(key) is str and not key.startswith(_MARK) for key in value):
            return dict(items)
        return {"$dict": [[self.encode(key, f"key {key!r} of {location}"), item] for key, item in items]}

    def _tensor(self, value: Tensor, location: str) -> dict[str, Any]:
        check_sendable(value, location)
        dense = value.detach().as_subclass(Tensor).resolve_conj().resolve_neg().cpu().contiguous()
        return {"$tensor": self._store(dense, location)}

    def _store(self, tensor: Tensor, location: str) -> str:
        if tensor.dtype not in _DTYPES:
            raise DataError(f"cannot save {location}: safetensors has no dtype {tensor.dtype}", location=location)
        name = str(len(self.tensors))
        memory = tensor.untyped_storage().data_ptr()
        self.tensors[name] = tensor.clone() if memory in self._memory else tensor
        self._memory.add(memory)
        return name

    def _array(self, value: np.ndarray, location: str) -> dict[str, Any]:
        if value.dtype.kind in "biuf" and value.dtype.isnative and value.dtype.itemsize <= 8:
            return {"$array": self._store(torch.from_numpy(np.array(value, order="C")), location)}
        if value.dtype.kind not in "OU":
            raise DataError(
                f"cannot save {location}, which is an array of {value.dtype}: expected arrays of numbers, strings or "
                "objects",
                location=location,
                type=str(value.dtype),
            )
        entries = [self.encode(item, f"{location}[{index}]") for index, item in enumerate(value.ravel().tolist())]
        return {"$objects": [entries, list(value.shape), value.dtype.str]}


class _Reader:
    """Decodes the values that ``_Writer`` encoded."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            (kind, content), *_ = value.items()
            if kind.startswith(_MARK):
                return self._marked(kind, content)
        return {key: self.decode(item) for key, item in value.items()}

    def _marked(self, kind: str, content: Any) -> Any:
        match kind, content:
            case "$tuple", items:
                return tuple(self.decode(items))
            case "$dict", items:
                return {self.decode(key): self.decode(item) for key, item in items}
            case "$tensor", name:
                return self.tensors[name]
            case "$array", name:
                return self.tensors[name].numpy()
            case "$number", array:
                return self.decode(array)[()]
            case "$objects", [entries, shape, dtype]:
                return self._objects(entries, shape, dtype)
            case "$tensordict", [items, batch_size]:
                return make_tensordict(self.decode(items), batch_size)
        raise DataError(f"the file contains a value of kind {kind!r}, which this version cannot read", kind=kind)

    def _objects(self, entries: list[Any], shape: list[int], dtype: str) -> np.ndarray:
        kind = np.dtype(dtype)
        longest = max((len(entry) for entry in entries if isinstance(entry, str)), default=0)
        if kind.kind not in "OU" or kind.itemsize > 4 * max(longest, _WIDEST_EMPTY):
            raise DataError(f"the file has an array of {dtype!r:.50}, expected objects or strings", dtype=dtype)
        array = np.empty(len(entries), dtype=kind)
        for index, entry in enumerate(entries):
            array[index] = self.decode(entry)
        return array.reshape(shape)
