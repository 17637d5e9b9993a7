"""A batch in a file, without pickle: one safetensors file with a JSON description among its tensors.

Tensors and numeric arrays, wherever they stand, are tensors of the file, which refers to them by number. Everything
else must be a JSON value, a tuple, or a numpy number. Reading builds nothing but these types, so that a file from
elsewhere can be opened without running code of its author's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from mcontroller.data import columns
from mcontroller.data.serialization import check_sendable
from mcontroller.data.tensordicts import is_tensordict, make_tensordict
from mcontroller.errors import DataError

_DESCRIPTION = "description"
_FORMAT = "mcontroller.DataProto"
_VERSION = 1
# A dict with one key that starts with this mark stands for something JSON has no word for.
_MARK = "$"

_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32}
    | {torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.float8_e4m3fn, torch.float8_e5m2}
)

Parts = tuple[Any, dict[str, np.ndarray], dict[str, Any]]


def save(
    filepath: str | os.PathLike[str],
    batch: columns.Batch | None,
    non_tensor_batch: dict[str, np.ndarray],
    meta_info: dict[str, Any],
) -> None:
    """Writes the three parts of a batch; the file appears under its name when it is complete.

    Raises DataError naming the column or key whose value has no place in such a file, and its type.
    """
    writer = _Writer()
    description = {
        "format": _FORMAT,
        "version": _VERSION,
        "batch": writer.encode(batch, "batch"),
        "non_tensor_batch": writer.encode(non_tensor_batch, "non_tensor_batch"),
        "meta_info": writer.encode(meta_info, "meta_info"),
    }
    text = json.dumps(description, ensure_ascii=False).encode()
    writer.tensors[_DESCRIPTION] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    target = Path(filepath)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    safetensors.torch.save_file(writer.tensors, part)
    part.replace(target)


def load(filepath: str | os.PathLike[str]) -> Parts:
    """The three parts of the batch that ``save`` wrote, on the CPU; DataError for a file of another kind."""
    try:
        tensors = safetensors.torch.load_file(filepath)
    except safetensors.SafetensorError as error:
        raise DataError(f"{os.fspath(filepath)} is no safetensors file: {error}", path=filepath) from error
    if _DESCRIPTION not in tensors:
        raise DataError(f"{os.fspath(filepath)} holds no saved DataProto: it has no {_DESCRIPTION!r}", path=filepath)
    description = json.loads(tensors[_DESCRIPTION].numpy().tobytes())
    if (description.get("format"), description.get("version")) != (_FORMAT, _VERSION):
        raise DataError(
            f"{os.fspath(filepath)} is {description.get('format')!r} version {description.get('version')!r}: "
            f"this reads {_FORMAT!r} version {_VERSION}",
            path=filepath,
        )
    reader = _Reader(tensors)
    batch, arrays, info = (reader.decode(description[name]) for name in ("batch", "non_tensor_batch", "meta_info"))
    return batch, arrays, info


class _Writer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._memory: set[int] = set()

    def encode(self, value: Any, place: str) -> Any:
        if value is None or type(value) in (str, bool, int, float):
            return value
        if type(value) is dict:
            return self._dict(value, place)
        if type(value) is list:
            return [self.encode(item, f"{place}[{index}]") for index, item in enumerate(value)]
        if type(value) is tuple:
            return {"$tuple": [self.encode(item, f"{place}[{index}]") for index, item in enumerate(value)]}
        if is_tensordict(value) or isinstance(value, columns.Columns):
            columns_ = self._dict(dict(value.items()), place)
            return {"$tensordict": [columns_, list(value.batch_size)]}
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if isinstance(value, np.ndarray):
            return self._array(value, place)
        if isinstance(value, np.bool_ | np.number):
            return {"$number": self._array(np.asarray(value), place)}
        raise DataError(
            f"{place} is {type(value).__name__}, which has no place in a file without pickle: "
            "save numbers, strings, lists, tuples, dicts, arrays and tensors",
            place=place,
            type=type(value).__name__,
        )

    def _dict(self, value: dict[Any, Any], place: str) -> dict[str, Any]:
        items = [(key, self.encode(item, f"{place}[{key!r}]")) for key, item in value.items()]
        if all(type(key) is str and not key.startswith(_MARK) for key in value):
            return dict(items)
        return {"$dict": [[self.encode(key, f"key {key!r} of {place}"), item] for key, item in items]}

    def _tensor(self, value: Tensor, place: str) -> dict[str, Any]:
        if columns.is_jagged(value):
            values, offsets, ragged = columns.packed(value)
            return {"$jagged": [self._tensor(values, place), self._tensor(offsets, place), ragged]}
        check_sendable(value, place)
        dense = value.detach().as_subclass(Tensor).cpu().contiguous()
        return {"$tensor": self._store(dense, place)}

    def _store(self, tensor: Tensor, place: str) -> str:
        if tensor.dtype not in _DTYPES:
            raise DataError(f"{place} is {tensor.dtype}, which a safetensors file does not hold", place=place)
        name = str(len(self.tensors))
        memory = tensor.untyped_storage().data_ptr()
        self.tensors[name] = tensor.clone() if memory in self._memory else tensor
        self._memory.add(memory)
        return name

    def _array(self, value: np.ndarray, place: str) -> dict[str, Any]:
        if value.dtype.kind in "biuf" and value.dtype.isnative and value.dtype.itemsize <= 8:
            return {"$array": self._store(torch.from_numpy(np.array(value)), place)}
        if value.dtype.kind not in "OU":
            raise DataError(
                f"{place} is an array of {value.dtype}, which has no place in a file without pickle: "
                "save arrays of numbers, strings or objects",
                place=place,
                type=str(value.dtype),
            )
        entries = [self.encode(item, f"{place}[{index}]") for index, item in enumerate(value.ravel().tolist())]
        return {"$objects": [entries, list(value.shape), value.dtype.str]}


class _Reader:
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
            case "$jagged", [values, offsets, ragged]:
                return columns.jagged(self.decode(values), self.decode(offsets), ragged)
            case "$tensordict", [items, batch_size]:
                return make_tensordict(self.decode(items), batch_size)
        raise DataError(f"the description holds {kind!r}, which this version does not know", kind=kind)

    def _objects(self, entries: list[Any], shape: list[int], dtype: str) -> np.ndarray:
        array = np.empty(len(entries), dtype=np.dtype(dtype))
        for place, entry in enumerate(entries):
            array[place] = self.decode(entry)
        return array.reshape(shape)
