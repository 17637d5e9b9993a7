"""Check columns, keys and row numbers; every check raises DataError with the names and the numbers."""

from __future__ import annotations

import operator
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.columns import Columns, is_jagged, make_columns
from mcontroller.data.tensordicts import is_tensordict, is_tensordict_base, make_tensordict
from mcontroller.errors import DataError

if TYPE_CHECKING:
    from mcontroller.data.columns import Batch

Index = Sequence[int] | Sequence[bool] | np.ndarray | Tensor
"""Row numbers (negative: from the end) or a mask with one boolean per row."""

Keys = str | Sequence[str]
"""One name or several."""


class RowIndexError(DataError, IndexError):
    """A row that the batch does not have; fields ``index`` and ``rows``."""


def check_mapping(argument: str, value: object) -> None:
    """Check that an argument is a dict or another mapping, or None.

    Raises:
        DataError: if it is not; names the argument.
    """
    if not (value is None or isinstance(value, Mapping) or is_tensordict_base(value)):
        raise DataError(f"{argument} is {type(value).__name__}: expected a dict of name -> value", argument=argument)


def count(argument: str, value: Any, least: int) -> int:
    """Return an argument that counts something as an int.

    Raises:
        DataError: if it is not an integer, or less than ``least``; names the argument.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= sys.maxsize:
        raise DataError(f"{argument} is {value!r}: expected an integer of at least {least}", **{argument: value})
    return number


def counts(argument: str, values: Any, rows: int) -> np.ndarray:
    """Return an argument that counts something for each row as an int64 array.

    Raises:
        DataError: if their number is not the number of rows, or one is negative or not an integer.
    """
    numbers = integers(values)
    if numbers.shape != (rows,) or (numbers.size and numbers.dtype.kind not in "iub") or (numbers < 0).any():
        raise DataError(
            f"{argument} has shape {numbers.shape} and dtype {numbers.dtype} for {rows} rows: "
            "expected one integer per row, each at least 0",
            shape=numbers.shape,
            rows=rows,
        )
    return numbers.astype(np.int64)


def check_parts(data: Any, kind: type) -> None:
    """Check that the argument of ``concat`` is a list of at least one batch.

    Raises:
        DataError: if it is not.
    """
    if isinstance(data, kind):
        raise DataError("concat of a DataProto: expected a list of DataProtos")
    if not isinstance(data, Sequence):
        raise DataError(f"concat of {type(data).__name__}: expected a list of DataProtos")
    others = [part for part in data if not isinstance(part, kind)]
    if others or not data:
        found = f"a list that contains a {type(others[0]).__name__}" if others else "an empty list"
        raise DataError(f"concat of {found}: expected a list of at least one DataProto")


def check_columns(batch: Batch | None, arrays: Mapping[str, Any]) -> None:
    """Check the kind of every column, and that all have the same number of rows.

    Raises:
        DataError: if a column is of another kind, or has another number of rows than the first; names it.
    """
    expected: int | None = None
    if batch is not None:
        _check_batch(batch)
        expected = batch.batch_size[0]
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            kind = "a 0-d numpy array" if isinstance(array, np.ndarray) else type(array).__name__
            raise DataError(
                f"non_tensor_batch[{key!r}] is {kind}: expected a numpy array with one entry per row", column=key
            )
        if expected is not None and array.shape[0] != expected:
            raise DataError(
                f"non_tensor_batch[{key!r}] has {array.shape[0]} rows, the batch has {expected}: "
                "all columns of a batch must have the same number of rows",
                column=key,
                found=array.shape[0],
                rows=expected,
            )
        expected = array.shape[0]


def _check_batch(batch: Any) -> None:
    if not (isinstance(batch, Columns) or (is_tensordict(batch) and batch.batch_dims >= 1)):
        dims = f" of batch dims {list(batch.batch_size)}" if is_tensordict(batch) else ""
        raise DataError(
            f"batch is {type(batch).__name__}{dims}: expected a TensorDict of at least one batch dim; "
            "to make a batch from a dict of tensors, call DataProto.from_dict"
        )
    for key, value in batch.items():
        if is_tensordict(value):
            continue
        if not isinstance(value, Tensor):
            raise DataError(
                f"batch[{key!r}] is {type(value).__name__}: expected a tensor; put other values into non_tensor_batch",
                column=key,
            )
        if value.layout != torch.strided and not is_jagged(value):
            raise DataError(f"batch[{key!r}] has layout {value.layout}: expected a dense or jagged tensor", column=key)


def check_same_columns(parts: Sequence[tuple[Batch | None, Mapping[str, Any]]]) -> None:
    """Check that parts to be joined agree in their non-tensor columns, and that all or none have tensors.

    Args:
        parts: tensors and non-tensor columns of every part.

    Raises:
        DataError: if a part differs from part 0; names the part.
    """
    if not any([arrays or batch is None for batch, arrays in parts]):
        return
    first_batch, first_arrays = parts[0]
    for position, (batch, arrays) in enumerate(parts):
        if arrays.keys() != first_arrays.keys():
            raise DataError(
                f"non_tensor_batch of part {position} has columns {sorted(arrays)}, of part 0 "
                f"{sorted(first_arrays)}: all parts must have the same columns",
                part=position,
                columns=sorted(arrays),
                expected=sorted(first_arrays),
            )
        if (batch is None) is not (first_batch is None):
            without, other = (position, 0) if batch is None else (0, position)
            raise DataError(
                f"part {without} has no tensors, part {other} has: all parts must have the same columns", part=position
            )


def make_batch(tensors: Mapping[str, Any], batch_dims: int) -> Batch:
    """Make a batch from tensors.

    Args:
        tensors: columns by name.
        batch_dims: number of leading dims that all columns must share.

    Raises:
        DataError: if a column is not a tensor, or has other batch dims than the first; names the column.
    """
    first_key: str | None = None
    batch_size = torch.Size()
    for key, value in tensors.items():
        if not (isinstance(value, Tensor) or is_tensordict_base(value)):
            raise _not_a_tensor(key, value)
        if value.ndim < batch_dims:
            raise DataError(
                f"tensors[{key!r}] has {value.ndim} dims: expected at least {batch_dims}, dim 0 being the rows",
                column=key,
            )
        found = value.shape[:batch_dims]
        if first_key is None:
            first_key, batch_size = key, found
        elif found != batch_size:
            raise DataError(
                f"tensors[{key!r}] has {_size_text(found)}, tensors[{first_key!r}] has {_size_text(batch_size)}: "
                "all columns of a batch must have the same number of rows",
                column=key,
                found=tuple(found),
                expected=tuple(batch_size),
            )
    if all(isinstance(value, Tensor) and type(key) is str for key, value in tensors.items()):
        return make_columns(tensors, batch_size)
    return make_tensordict(tensors, batch_size)


def _size_text(batch_size: torch.Size) -> str:
    return f"{batch_size[0]} rows" if len(batch_size) == 1 else f"batch dims {list(batch_size)}"


def _not_a_tensor(key: str, value: Any) -> DataError:
    """Return the error for a column that is not a tensor, with the fix for values of its type."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        kind = f"a numpy array of {value.dtype}"
        fix = f"convert it with torch.from_numpy, or pass it as non_tensors={{{key!r}: ...}}"
    elif isinstance(value, np.ndarray):
        kind = f"a numpy array of {value.dtype}"
        fix = f"pass strings and objects as non_tensors={{{key!r}: ...}}"
    elif isinstance(value, list | tuple) and value and all(isinstance(entry, int | float) for entry in value):
        kind = f"a {kind} of numbers"
        fix = f"convert it with torch.tensor, or pass it as non_tensors={{{key!r}: ...}}"
    elif isinstance(value, list | tuple):
        kind = f"a {kind}" + (f" of {type(value[0]).__name__}" if value else "")
        fix = f"pass strings and objects as non_tensors={{{key!r}: ...}}"
    else:
        fix = f"pass one value for the whole batch as meta_info={{{key!r}: ...}}"
    return DataError(f"tensors[{key!r}] is {kind}: expected a torch.Tensor; {fix}", column=key)


def check_names(argument: str, names: Iterable[Any]) -> None:
    """Check that all names of columns are strings.

    Raises:
        DataError: if one is not; names the argument and the value.
    """
    for name in names:
        if not isinstance(name, str):
            raise DataError(f"{argument} has {name!r}: names of columns are strings", argument=argument, name=name)


def as_array(value: Any, name: str = "a non-tensor column") -> np.ndarray:
    """Return an array unchanged, and a list as a 1-D object array of its entries, whatever they are.

    Args:
        value: a numpy array, list or tuple with one entry per row.
        name: name of the value in error messages.

    Raises:
        DataError: if the value is of another type.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        fix = "; pass tensors as tensors={...}" if isinstance(value, Tensor) else ""
        raise DataError(
            f"{name} is {type(value).__name__}: expected a numpy array or a list with one entry per row{fix}"
        )
    column = np.empty(len(value), dtype=object)
    for row, entry in enumerate(value):
        column[row] = entry
    return column


def as_keys(keys: Keys | None, default: Iterable[str] = ()) -> list[str]:
    """Return names as a list: one name, several, or ``default`` for None.

    Raises:
        DataError: if they are neither a string nor several names.
    """
    if keys is None:
        return list(default)
    if isinstance(keys, str):
        return [keys]
    if isinstance(keys, np.ndarray | Tensor) or not isinstance(keys, Iterable):
        raise DataError(f"{type(keys).__name__} in place of names: expected a string or a list of strings")
    names = list(keys)
    check_names("the list of names", [name for name in names if not isinstance(name, Hashable)])
    return names


def check_keys(kind: str, wanted: Iterable[str], present: Iterable[str]) -> None:
    """Check that all wanted keys are present.

    Args:
        kind: the kind of the keys in error messages, such as "meta_info key".
        wanted: keys that must be present.
        present: keys that exist.

    Raises:
        DataError: if some are missing; names them and those that exist.
    """
    existing = list(present)
    missing = [key for key in wanted if key not in existing]
    if missing:
        raise DataError(f"no {kind} {missing}; existing: {sorted(existing)}", missing=missing, present=sorted(existing))


def row_index(idxs: Any, rows: int) -> np.ndarray:
    """Convert an index or a mask to row numbers.

    Args:
        idxs: integers (negative: from the end) or booleans, as a 1-D list, array or tensor.
        rows: number of rows of the batch.

    Returns:
        Row numbers between 0 and ``rows - 1``, int64.

    Raises:
        RowIndexError: if a row does not exist.
        DataError: if the index is of another type or shape.
    """
    if isinstance(idxs, str):
        raise DataError(
            f"row {idxs!r}: rows are selected by number; a column is batch.batch[{idxs!r}] or "
            f"batch.non_tensor_batch[{idxs!r}]",
            column=idxs,
        )
    index = integers(idxs)
    if index.dtype == bool:
        if index.shape != (rows,):
            raise DataError(
                f"mask of shape {index.shape} for {rows} rows: expected one boolean per row",
                shape=index.shape,
                rows=rows,
            )
        return np.flatnonzero(index)
    if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
        raise DataError(
            f"rows selected by {index.dtype} of shape {index.shape}: expected a 1-D list, array or tensor of integers "
            "or booleans"
        )
    index = index.astype(np.int64)
    if index.size and (index.min() < -rows or index.max() >= rows):
        wrong = int(index[(index < -rows) | (index >= rows)][0])
        raise RowIndexError(f"row {wrong} does not exist in a batch of {rows} rows", index=wrong, rows=rows)
    return np.where(index < 0, index + rows, index)


def integers(values: Any) -> np.ndarray:
    """Return a list, array or tensor as an array on the CPU; one of objects if its entries are not numbers."""
    try:
        return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    except (ValueError, TypeError):  # rows of different lengths, or a sparse tensor
        return np.array([None], dtype=object)


def check_permutation(index: np.ndarray, rows: int) -> None:
    """Check that an index contains each row exactly once.

    Raises:
        DataError: if it does not.
    """
    distinct = len(np.unique(index))
    if len(index) != rows or distinct != rows:
        raise DataError(
            f"reorder of {rows} rows by {len(index)} indices, {distinct} of them distinct: expected each row once",
            rows=rows,
            indices=len(index),
        )
