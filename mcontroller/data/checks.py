"""Checks of the arguments of a batch's methods, and of the columns that a batch is made of."""

from __future__ import annotations

import operator
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.columns import describe, is_tensordict, make_tensordict
from mcontroller.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

Keys = str | Sequence[str]
"""One name or several."""


class RowIndexError(DataError, IndexError):
    """A row that the batch does not have; fields ``index`` and ``rows``."""


def check_mapping(argument: str, value: object) -> None:
    """Check that an argument is a dict, or None, and that names of columns are strings."""
    if not (value is None or isinstance(value, Mapping)):
        raise DataError(f"{argument} is {type(value).__name__}: expected a dict of name -> value", argument=argument)
    for name in () if value is None else value.keys():
        if not isinstance(name, str) and argument != "meta_info":
            raise DataError(f"{argument} has {name!r}: names of columns are strings", argument=argument, name=name)


def as_count(argument: str, value: Any, least: int) -> int:
    """Return an argument that counts something as an int."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= sys.maxsize:
        raise DataError(f"{argument} is {value!r}: expected an integer of at least {least}", **{argument: value})
    return number


def _numbers(values: Any) -> np.ndarray:
    """Return a list, array or tensor as an array on the CPU; one of objects if its entries are not numbers."""
    try:
        return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    except (ValueError, TypeError):  # rows of different lengths, or a sparse tensor
        return np.array([None], dtype=object)


def row_index(idxs: Any, rows: int) -> np.ndarray:
    """Convert an index or a mask to row numbers between 0 and ``rows - 1``, int64."""
    if isinstance(idxs, str):
        text = f"row {idxs!r}: rows are selected by number; a column is batch.batch[{idxs!r}] or "
        raise DataError(f"{text}batch.non_tensor_batch[{idxs!r}]", column=idxs)
    index = _numbers(idxs)
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


def as_keys(keys: Keys | None, default: Iterable[str] = ()) -> list[str]:
    """Return names as a list: one name, several, or ``default`` for None."""
    if keys is None or isinstance(keys, str):
        return list(default) if keys is None else [keys]
    names = list(keys) if isinstance(keys, Iterable) and not isinstance(keys, np.ndarray | Tensor) else [keys]
    if not all(isinstance(name, Hashable) for name in names) or names == [keys]:
        raise DataError(f"names are {keys!r:.80}: expected a string or a list of strings", names=keys)
    return names


def check_keys(kind: str, wanted: Iterable[str], present: Iterable[str]) -> None:
    """Check that names exist; the error lists those that do."""
    existing = list(present)
    missing = [key for key in wanted if key not in existing]
    if missing:
        raise DataError(f"no {kind} {missing}; existing: {sorted(existing)}", missing=missing, present=sorted(existing))


def as_array(value: Any, name: str = "a non-tensor column") -> np.ndarray:
    """Return an array unchanged, and a list as a 1-D object array of its entries, whatever they are."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        text = f"{name} is {describe(value)}: expected an array or a list with one entry per row"
        raise DataError(f"{text}; tensors are passed as tensors={{...}}", column=name)
    column = np.empty(len(value), dtype=object)
    for row, entry in enumerate(value):
        column[row] = entry
    return column


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
        dims = tuple(value.shape[:batch_dims])
        if len(dims) < batch_dims:
            text = f"tensors[{key!r}] has {value.ndim} dims: expected at least {batch_dims}, dim 0 being the rows"
            raise DataError(text, column=key)
        first, rows = next(iter((expected or {key: dims}).items()))
        if dims != rows:
            text = f"tensors[{key!r}] has batch dims {list(dims)}, tensors[{first!r}] has {list(rows)}"
            raise DataError(f"{text}: all columns must have the same rows", column=key, found=dims, expected=rows)
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
    for key, column in () if batch is None else batch.items():
        layout = column.layout if isinstance(column, Tensor) else type(column).__name__
        if layout not in (torch.strided, torch.jagged) and not is_tensordict(column):
            raise DataError(f"batch[{key!r}] is {layout}: expected a dense or jagged tensor", column=key)
    for key, array in arrays.items():
        name = f"non_tensor_batch[{key!r}]"
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise DataError(f"{name} is {describe(array)}: expected an array with one entry per row", column=key)
        if rows is not None and len(array) != rows:
            text = f"{name} has {len(array)} rows, the batch has {rows}: all columns must have the same number of rows"
            raise DataError(text, column=key, found=len(array), rows=rows)
        rows = len(array)
