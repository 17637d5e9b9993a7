"""Columns of a batch: tensors and TensorDicts; how their rows are selected and joined.

The checks of the arguments of a batch's methods are at the end.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from mcontroller.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict
    from typing_extensions import TypeIs

Keys = str | Sequence[str]
"""One name or several."""

LARGE_BYTES = 4 << 20
"""From this size on, torch concatenates with several threads."""

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of each element size in bytes: numpy and torch support it where they lack a dtype of that size."""


def is_tensordict(value: object) -> TypeIs[TensorDict]:
    """Return whether a value is a TensorDict; without the package imported, none is."""
    package = sys.modules.get("tensordict")
    return package is not None and isinstance(value, package.TensorDict)


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


def local_device(device: str) -> torch.device:
    """Return this process's current device of a type such as "cuda", or the CPU if it has none."""
    module = getattr(torch, device, None)
    return torch.device(device if module is not None and module.is_available() else "cpu")


def describe(value: Any, limit: int = 80) -> str:
    """Return dtype and shape of tensors and arrays, else the repr of the value, cut to ``limit`` characters.

    Such as ``int64[8, 16]``, or ``float32[8, 4] on cuda:0``.
    """
    if isinstance(value, Tensor):
        shape = ", ".join(map(str, value.shape))
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]{device}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    if is_tensordict(value):
        return "{" + ", ".join(f"{key}: {describe(column)}" for key, column in value.items()) + "}"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


# ---- rows of columns -------------------------------------------------------------------------------------------------


def leaf_tensors(batch: TensorDict | None) -> Iterable[Any]:
    """Return every tensor of a batch, also of nested TensorDicts."""
    return () if batch is None else batch.values(include_nested=True, leaves_only=True)


def shallow_copy(batch: TensorDict | None) -> TensorDict | None:
    """Return a batch with the same tensors, to which columns can be added without changing the original."""
    return None if batch is None else batch.copy()


def take_rows(column: Tensor, index: Tensor) -> Tensor:
    """Return the rows at an index (int64 ``[rows]``) as a copy."""
    index = index.to(column.device)
    if column.requires_grad or column.is_complex() or column.is_neg():
        return column.index_select(0, index)
    bits = column.view(INTEGER_OF_SIZE[column.dtype.itemsize])  # torch selects no rows of float8 and some integers
    return bits.index_select(0, index).view(column.dtype)


def join_rows(parts: Sequence[TensorDict], name: str = "") -> TensorDict:
    """Concatenate the rows of all parts, as a copy.

    Args:
        parts: at least one batch; all must have the same columns, which may differ in dim 0 only.
        name: name of the parts in error messages, if they are nested in a column.

    Raises:
        DataError: if parts differ in columns, dtypes or shapes; names the column and the part.
    """
    first = parts[0]
    for position, part in enumerate(parts):
        if part.keys() != first.keys():
            raise DataError(
                f"{name or 'batch'} of part {position} has columns {sorted(part.keys())}, of part 0 "
                f"{sorted(first.keys())}: all parts must have the same columns",
                column=name,
                part=position,
                columns=sorted(part.keys()),
                expected=sorted(first.keys()),
            )
    prefix = f"{name}." if name else ""
    columns = {str(key): _join([part[key] for part in parts], f"{prefix}{key}") for key, _ in first.items()}
    return make_tensordict(columns, (sum(map(len, parts)), *first.batch_size[1:]), first.device)


def _join(columns: Sequence[Any], name: str) -> Any:
    kind = _kind(columns[0])
    for position, column in enumerate(columns):
        if _kind(column) != kind:  # torch.cat promotes dtypes, and accepts an empty column of any shape
            given, expected = describe(column), describe(columns[0])
            raise DataError(
                f"column {name!r} of part {position} is {given}, of part 0 {expected}: only dim 0 may differ",
                column=name,
                part=position,
                actual=given,
                expected=expected,
            )
    return _concat(columns) if isinstance(columns[0], Tensor) else join_rows(columns, name)


def _kind(column: Any) -> tuple[Any, ...]:
    """Return what columns must have in common to be joined: dtype, device, and shape without dim 0."""
    return (column.dtype, column.device, column.shape[1:]) if isinstance(column, Tensor) else (type(column),)


def _concat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of tensors; large ones on the CPU on one thread, because the workers need the cores.

    The threads of ``torch.cat`` wait for each other, and spin for milliseconds after it. Measured on 2 cores, medians,
    four columns in 8 parts, one thread against torch's threads: while other processes keep the cores busy, 15 MB take
    4.2 ms against 109 ms, and 120 MB 27 ms against 189 ms; on idle cores 120 MB take 28 ms in both. Below
    ``LARGE_BYTES``, torch is as fast or faster.
    """
    first = tensors[0]
    if first.nbytes * len(tensors) < LARGE_BYTES or not all(map(_is_plain_memory, tensors)):
        return torch.cat(list(tensors))
    parts = [tensor.view(INTEGER_OF_SIZE[first.dtype.itemsize]).numpy() for tensor in tensors]
    shape = (sum(map(len, tensors)), *first.shape[1:])
    return torch.from_numpy(np.concatenate(parts, out=np.empty(shape, parts[0].dtype))).view(first.dtype)


def _is_plain_memory(tensor: Tensor) -> bool:
    """Return whether numpy can copy the tensor as integers, without losing anything."""
    return (
        tensor.device.type == "cpu"
        and tensor.dtype.itemsize in INTEGER_OF_SIZE
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


def join_arrays(parts: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Concatenate the rows of arrays, as a copy.

    Raises:
        DataError: if parts differ in shape, or one has text and another numbers, which would become text; names the
            column and the part.
    """
    filled = [(position, part) for position, part in enumerate(parts) if len(part)]
    first = filled[0][1] if filled else parts[0]
    for position, part in filled:
        is_text = {array.dtype.kind in "US" for array in (first, part) if not array.dtype.hasobject}
        if part.shape[1:] != first.shape[1:] or len(is_text) > 1:
            given, expected = describe(part), describe(first)
            raise DataError(
                f"non-tensor column {name!r} of part {position} is {given}, of another {expected}: only dim 0 may "
                "differ, and numbers do not become text; a list in place of an array keeps entries as they are",
                column=name,
                part=position,
                actual=given,
                expected=expected,
            )
    return np.concatenate([part for _, part in filled] or [first])  # an empty one may have any dtype


# ---- checks ----------------------------------------------------------------------------------------------------------


class RowIndexError(DataError, IndexError):
    """A row that the batch does not have; fields ``index`` and ``rows``."""


def as_count(argument: str, value: Any, least: int) -> int:
    """Return an argument that counts something as an int."""
    if not isinstance(value, SupportsIndex) or operator.index(value) < least:
        raise DataError(f"{argument} is {value!r}: expected an integer of at least {least}", **{argument: value})
    return operator.index(value)


def row_index(idxs: Any, rows: int) -> np.ndarray:
    """Convert an index or a mask to row numbers between 0 and ``rows - 1``, int64."""
    if isinstance(idxs, str):
        text = f"row {idxs!r}: rows are selected by number; a column is batch.batch[{idxs!r}] or "
        raise DataError(f"{text}batch.non_tensor_batch[{idxs!r}]", column=idxs)
    index = np.asarray(idxs.detach().cpu() if isinstance(idxs, Tensor) else idxs)
    if index.dtype == bool and index.shape == (rows,):
        return np.flatnonzero(index)
    if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
        raise DataError(
            f"rows selected by {index.dtype} of shape {index.shape}: expected a 1-D list, array or tensor of integers, "
            f"or of {rows} booleans",
            shape=index.shape,
            rows=rows,
        )
    index = index.astype(np.int64)
    outside = index[(index < -rows) | (index >= rows)]
    if outside.size:
        row = int(outside[0])
        raise RowIndexError(f"row {row} does not exist in a batch of {rows} rows", index=row, rows=rows)
    return np.where(index < 0, index + rows, index)


def as_keys(keys: str | Iterable[str] | None, default: Iterable[str] = ()) -> list[str]:
    """Return names as a list: one name, several, or ``default`` for None."""
    if keys is None:
        return list(default)
    return [keys] if isinstance(keys, str) else list(keys)


def check_keys(kind: str, wanted: Iterable[str], present: Iterable[str]) -> None:
    """Check that names exist; the error lists those that do."""
    existing = sorted(present, key=str)
    missing = [key for key in wanted if key not in existing]
    if missing:
        raise DataError(f"no {kind} {missing}; existing: {existing}", missing=missing, present=existing)


def as_array(value: Any, column: str = "") -> np.ndarray:
    """Return an array unchanged, and a list as a 1-D object array of its entries, whatever they are."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise DataError(
            f"non-tensor column {column!r} is {describe(value)}: expected an array or a list with one entry per row; "
            "pass tensors as tensors={...}, and one value for the whole batch as meta_info={...}",
            column=column,
        )
    entries = np.empty(len(value), dtype=object)
    for row, entry in enumerate(value):
        entries[row] = entry
    return entries


def make_batch(tensors: Mapping[str, Any], batch_dims: int) -> TensorDict:
    """Make a TensorDict of columns that must share their first ``batch_dims`` dims."""
    expected: dict[str, tuple[int, ...]] = {}
    for key, value in tensors.items():
        if not (isinstance(value, Tensor) or is_tensordict(value)):
            raise DataError(
                f"tensors[{key!r}] is {describe(value)}: expected a torch.Tensor; convert numbers with torch.tensor, "
                f"pass strings and objects as non_tensors={{{key!r}: ...}}, and one value for the whole batch as "
                f"meta_info={{{key!r}: ...}}",
                column=key,
                type=type(value).__name__,
            )
        _check_dense(value, f"tensors[{key!r}]", key)
        dims = tuple(value.shape[:batch_dims])
        if len(dims) < batch_dims:
            text = f"tensors[{key!r}] has {value.ndim} dims: expected at least {batch_dims}, dim 0 being the rows"
            raise DataError(text, column=key)
        first, rows = next(iter((expected or {key: dims}).items()))
        if dims != rows:
            text = f"tensors[{key!r}] has batch dims {list(dims)}, tensors[{first!r}] has {list(rows)}"
            raise DataError(f"{text}: all columns must have the same rows", column=key, actual=dims, expected=rows)
        expected[first] = rows
    return make_tensordict(tensors, next(iter(expected.values()), ()))


def check_columns(batch: Any, arrays: Mapping[str, Any]) -> None:
    """Check the kind of every column, and that all have the same number of rows."""
    rows: int | None = None
    if batch is not None:
        kind = type(batch).__name__
        if not is_tensordict(batch) or batch.batch_dims < 1:
            text = f"batch is {kind}: expected a TensorDict with a row dim; for a dict, call DataProto.from_dict"
            raise DataError(text, type=kind)
        rows = batch.batch_size[0]
        for key, column in batch.items():
            _check_dense(column, f"batch[{key!r}]", key)
    for key, array in arrays.items():
        name = f"non_tensor_batch[{key!r}]"
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise DataError(f"{name} is {describe(array)}: expected an array with one entry per row", column=key)
        if rows is not None and len(array) != rows:
            text = f"{name} has {len(array)} rows, the batch has {rows}: all columns must have the same number of rows"
            raise DataError(text, column=key, actual=len(array), rows=rows)
        rows = len(array)


def _check_dense(column: Any, location: str, name: str) -> None:
    """Check that a column of a batch, and every column in it, is a tensor of which rows can be selected."""
    if is_tensordict(column):
        for key, inner in column.items():
            _check_dense(inner, f"{location}[{key!r}]", name)
    elif not isinstance(column, Tensor) or column.is_nested or column.layout is not torch.strided:
        kind = type(column).__name__
        if isinstance(column, Tensor):
            kind = "a nested tensor" if column.is_nested else f"a tensor of layout {column.layout}"
        raise DataError(f"{location} is {kind}: expected a dense tensor", column=name)
