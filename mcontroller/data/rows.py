"""What a batch must be, and what its rows and keys may be named by: every check raises DataError with the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mcontroller.data import columns
from mcontroller.data.tensordicts import is_tensordict, is_tensordict_base, make_tensordict
from mcontroller.errors import DataError

if TYPE_CHECKING:
    from mcontroller.data.columns import Batch

Index = Sequence[int] | Sequence[bool] | np.ndarray | Tensor
Keys = str | Sequence[str]


class RowIndexError(DataError, IndexError):
    """A row that the batch does not have; fields ``index`` and ``rows``."""


def check_columns(batch: Batch | None, arrays: Mapping[str, Any]) -> None:
    """Raises DataError naming the column that is not one, or whose number of rows is not that of the first."""
    expected: int | None = None
    if batch is not None:
        _check_batch(batch)
        expected = batch.batch_size[0]
    for key, array in arrays.items():
        found = array.shape if isinstance(array, np.ndarray) else None
        if not found or found[0] != (found[0] if expected is None else expected):
            kind = type(array).__name__ if found is None else f"an array of shape {found}"
            rows = "as many rows as the batch" if expected is None else f"{expected} rows, as the batch has"
            raise DataError(
                f"non_tensor_batch[{key!r}] is {kind}: give a numpy array of {rows}", column=key, rows=expected
            )
        expected = found[0]


def _check_batch(batch: Any) -> None:
    if not (isinstance(batch, columns.Columns) or (is_tensordict(batch) and batch.batch_dims >= 1)):
        dims = f" of batch dims {list(batch.batch_size)}" if is_tensordict(batch) else ""
        raise DataError(
            f"batch is {type(batch).__name__}{dims}: give a TensorDict of at least one batch dim; from_dict makes a "
            "batch of a dict"
        )
    for key, value in batch.items():
        if is_tensordict(value):
            continue
        if not isinstance(value, Tensor):
            raise DataError(
                f"batch[{key!r}] is {type(value).__name__}: put what is not a tensor into non_tensor_batch", column=key
            )
        if value.layout != torch.strided and not columns.is_jagged(value):
            raise DataError(f"batch[{key!r}] has layout {value.layout}: give a dense or a jagged tensor", column=key)


def check_same_columns(parts: Sequence[Any]) -> None:
    """Raises DataError naming the first part whose non-tensor columns, or whether it has tensors, are not part 0's."""
    if not any([part.non_tensor_batch or part._batch is None for part in parts]):
        return
    expected, has_tensors = parts[0].non_tensor_batch.keys(), parts[0]._batch is not None
    for position, part in enumerate(parts):
        if part.non_tensor_batch.keys() != expected:
            raise DataError(
                f"non_tensor_batch of part {position} has columns {sorted(part.non_tensor_batch)}, of part 0 "
                f"{sorted(expected)}: give every part the same columns",
                part=position,
                columns=sorted(part.non_tensor_batch),
                expected=sorted(expected),
            )
        if (part._batch is not None) is not has_tensors:
            without, has = (position, 0) if part._batch is None else (0, position)
            raise DataError(
                f"part {without} has no tensors, part {has} does: give every part the same columns", part=position
            )


def make_batch(tensors: Mapping[str, Any], batch_dims: int) -> Batch:
    """A batch of columns that agree in their first ``batch_dims`` dims; DataError names the one that does not."""
    first_key, batch_size = "", torch.Size()
    for key, value in tensors.items():
        if not (isinstance(value, Tensor) or is_tensordict_base(value)):
            raise DataError(f"tensors[{key!r}] is {type(value).__name__}: give a torch.Tensor", column=key)
        if value.ndim < batch_dims:
            raise DataError(f"tensors[{key!r}] has {value.ndim} dims: give at least {batch_dims}", column=key)
        found = value.shape[:batch_dims]
        if not first_key:
            first_key, batch_size = key, found
        elif found != batch_size:
            raise DataError(
                f"tensors[{key!r}] has batch dims {list(found)}, tensors[{first_key!r}] has {list(batch_size)}: "
                "the columns of a batch have the same number of rows",
                column=key,
                found=tuple(found),
                expected=tuple(batch_size),
            )
    if all(isinstance(value, Tensor) and type(key) is str for key, value in tensors.items()):
        return columns.make(tensors, batch_size)
    return make_tensordict(tensors, batch_size)


def as_array(value: Any) -> np.ndarray:
    """An array as it is; a list as a 1-D object array, whatever its entries are."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise DataError(f"a non-tensor column is {type(value).__name__}: give a numpy array or a list, one entry a row")
    column = np.empty(len(value), dtype=object)
    for row, entry in enumerate(value):
        column[row] = entry
    return column


def as_keys(keys: Keys | None, default: Iterable[str] = ()) -> list[str]:
    if keys is None:
        return list(default)
    return [keys] if isinstance(keys, str) else list(keys)


def check_keys(what: str, wanted: Iterable[str], present: Iterable[str]) -> None:
    """Raises DataError naming the keys that are wanted and not present."""
    there = list(present)
    missing = [key for key in wanted if key not in there]
    if missing:
        raise DataError(f"no {what} {missing}; there are {sorted(there)}", missing=missing, present=sorted(there))


def row_index(idxs: Any, rows: int) -> np.ndarray:
    """Row numbers in ``[0, rows)`` from a list, array or tensor of integers (negative: from the end) or a mask."""
    if isinstance(idxs, str):
        raise DataError(f"row {idxs!r}: rows are named by number, columns by batch.batch[{idxs!r}]", column=idxs)
    given = np.asarray(idxs.detach().cpu() if isinstance(idxs, Tensor) else idxs)
    if given.dtype == bool:
        if given.shape != (rows,):
            raise DataError(f"mask of shape {given.shape} for {rows} rows", shape=given.shape, rows=rows)
        return np.flatnonzero(given)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise DataError(
            f"rows given as {given.dtype} of shape {given.shape}: give a 1-D list or tensor of integers or booleans"
        )
    index = given.astype(np.int64)
    if index.size and (index.min() < -rows or index.max() >= rows):
        wrong = int(index[(index < -rows) | (index >= rows)][0])
        raise RowIndexError(f"row {wrong} of a batch of {rows} rows", index=wrong, rows=rows)
    return np.where(index < 0, index + rows, index)


def check_permutation(index: np.ndarray, rows: int) -> None:
    different = len(np.unique(index))
    if len(index) != rows or different != rows:
        raise DataError(
            f"{rows} rows are put into the order of {len(index)} indices, {different} of them different: "
            "give each row once",
            rows=rows,
            indices=len(index),
        )
