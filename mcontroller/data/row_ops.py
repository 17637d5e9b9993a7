"""Row operations on the columns of a batch: views if torch can make them, copies if rows move."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.column_info import column_kind, describe_column
from mcontroller.data.columns import PLAIN, Columns, Schema, Unread, column_names, columns_like, read_columns
from mcontroller.data.copies import ConcatTensors, concat_tensors, index_select
from mcontroller.data.jagged import OffsetsMemo, is_jagged, join_jagged, slice_jagged, take_jagged
from mcontroller.data.tensordicts import is_tensordict, make_tensordict
from mcontroller.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from mcontroller.data.columns import Batch

__all__ = ["join_rows", "reshape_rows", "slice_rows", "split_columns", "stack_rows", "take_rows"]


def split_columns(batch: Batch, sizes: Sequence[int], memo: OffsetsMemo | None = None) -> list[Columns]:
    """Split a batch into consecutive parts of ``sizes`` rows each, as views.

    Args:
        batch: The batch.
        sizes: Number of rows of every part; their sum is the number of rows of the batch.
        memo: Shared offsets of jagged columns, see ``mcontroller.data.jagged``.
    """
    memo = {} if memo is None else memo
    if type(batch) is Columns:
        schema, values = batch.schema, batch.tensors
    else:
        values = tuple(batch.values())
        plain = set(map(type, values)) == PLAIN
        schema = Schema(column_names(batch), tuple(batch.batch_size[1:]), batch.device, plain)
    pieces = [_split(value, sizes, memo) for value in values]
    parts = zip(*pieces, strict=True) if pieces else [()] * len(sizes)
    return [Columns(schema, part, size) for part, size in zip(parts, sizes, strict=True)]


def slice_rows(batch: Batch, start: int, stop: int, step: int = 1, memo: OffsetsMemo | None = None) -> Columns:
    """Return rows ``start:stop:step`` as views; jagged columns are copied unless ``step`` is 1.

    Args:
        batch: The batch.
        start: First row, ``0 <= start <= stop``.
        stop: End of the rows, exclusive.
        step: Distance between rows, at least 1.
        memo: Shared offsets of jagged columns, see ``mcontroller.data.jagged``.
    """
    memo = {} if memo is None else memo
    tensors = {key: _slice(value, start, stop, step, memo) for key, value in batch.items()}
    return columns_like(batch, tensors, len(range(start, stop, step)))


def take_rows(batch: Batch, index: Tensor, memo: OffsetsMemo | None = None) -> Columns:
    """Return the rows at ``index`` as a copy.

    Args:
        batch: The batch.
        index: Row numbers, int64 ``[rows]``, each at least 0; repeats are allowed.
        memo: Shared offsets of jagged columns, see ``mcontroller.data.jagged``.
    """
    memo = {} if memo is None else memo
    return columns_like(batch, {key: _take(value, index, memo) for key, value in batch.items()}, len(index))


def join_rows(
    parts: Sequence[Batch], name: str = "", memo: OffsetsMemo | None = None, concat: ConcatTensors = concat_tensors
) -> Columns:
    """Concatenate the rows of all parts, as a copy.

    Args:
        parts: At least one batch; all must have the same columns, which may differ in dim 0 only.
        name: Name of the parts in error messages, if they are nested in a column.
        memo: Shared offsets of jagged columns, see ``mcontroller.data.jagged``.
        concat: Function that concatenates ordinary tensors.

    Raises:
        DataError: If parts differ in columns, dtypes or shapes; names the column and the part.
    """
    first = parts[0]
    if type(first) is Columns and first.schema.plain:
        schema = first.schema
        if all([type(part) is Columns and part.schema is schema for part in parts]):
            with suppress(RuntimeError, ValueError):  # such as parts on different devices: reported below
                return _join_same_schema(parts, concat)
    memo = {} if memo is None else memo
    names = column_names(first)
    if any([column_names(part) != names for part in parts]):
        _check_same_names(parts, name)
        parts = [_reordered(part, names) for part in parts]
    rows = [part.batch_size[0] for part in parts]
    check = 0 in rows  # torch.cat accepts an empty column of any shape
    columns: Any = zip(*[part.unread if type(part) is Columns else part.values() for part in parts], strict=True)
    prefix = f"{name}." if name else ""
    joined = [_join(column, prefix + key, memo, check, concat) for key, column in zip(names, columns, strict=False)]
    return columns_like(first, dict(zip(names, joined, strict=True)), sum(rows))


def reshape_rows(batch: Batch | None, reshape: Callable[[Any], Any], rows: int) -> TensorDict | None:
    """Apply ``reshape`` to every tensor; the result has ``rows`` rows.

    Raises:
        DataError: If a column is jagged; names it.
    """
    if batch is None:
        return None
    reshaped: dict[str, Any] = {}
    for key, value in batch.items():
        if is_jagged(value):
            raise DataError(f"column {key!r} is jagged: its batch dims cannot be folded or unfolded", column=key)
        reshaped[key] = reshape_rows(value, reshape, rows) if is_tensordict(value) else reshape(value)
    return make_tensordict(reshaped, (rows,), batch.device)


def stack_rows(items: Sequence[TensorDict | None]) -> TensorDict | None:
    """Stack single rows, TensorDicts without a row dim, into one batch, as a copy.

    Raises:
        DataError: If rows differ in dtype or shape of a column; names the column and the row.
    """
    if items[0] is None:
        return None
    for key, value in items[0].items():
        expected = describe_column(value)
        for position, item in enumerate(items):
            found = describe_column(None if item is None else item.get(key, None))
            if found != expected:
                raise DataError(
                    f"column {key!r} of row {position} is {found}, of row 0 {expected}: "
                    "rows of one batch must have the same dtype and shape",
                    column=key,
                    row=position,
                )
    stacked: Any = torch.stack(items)  # type: ignore[arg-type]
    contiguous: TensorDict = stacked.contiguous()
    return contiguous


def _split(column: Any, sizes: Sequence[int], memo: OffsetsMemo) -> Sequence[Any]:
    if type(column) is not Tensor:
        if is_tensordict(column):
            return [part.tensordict() for part in split_columns(column, sizes, memo)]
        if is_jagged(column):
            stops = itertools.accumulate(sizes)
            return [slice_jagged(column, stop - size, stop, memo) for stop, size in zip(stops, sizes, strict=True)]
    parts: Sequence[Any] = column.split_with_sizes(sizes)
    return parts


def _slice(column: Any, start: int, stop: int, step: int, memo: OffsetsMemo) -> Any:
    if is_tensordict(column):
        return slice_rows(column, start, stop, step, memo).tensordict()
    if is_jagged(column):
        if step != 1:
            return take_jagged(column, torch.arange(start, stop, step), memo)
        return slice_jagged(column, start, stop, memo)
    return column[start:stop:step]


def _take(column: Any, index: Tensor, memo: OffsetsMemo) -> Any:
    if is_tensordict(column):
        return take_rows(column, index, memo).tensordict()
    if is_jagged(column):
        return take_jagged(column, index, memo)
    return index_select(column, 0, index)


def _join_same_schema(parts: Sequence[Any], concat: ConcatTensors) -> Columns:
    """Join parts of one plain schema, whose columns need not be compared."""
    columns = zip(*[part.unread for part in parts], strict=True)
    if any([part.has_unread for part in parts]):
        joined = tuple([_join_unread(column, concat) for column in columns])
    else:
        joined = tuple(map(concat, columns))
    return Columns(parts[0].schema, joined, sum([part.rows for part in parts]))


def _join(columns: Sequence[Any], name: str, memo: OffsetsMemo, check: bool, concat: ConcatTensors) -> Any:
    if Unread in set(map(type, columns)):
        if _are_joinable_unread(columns):
            return _join_unread(columns, concat)
        columns = read_columns(columns)
    if check or not _are_plain(columns):
        _check_same_kind(columns, name)
        if is_tensordict(columns[0]):
            return join_rows(columns, name, memo, concat).tensordict()
        if is_jagged(columns[0]):
            return join_jagged(columns, memo)
    try:
        return concat(columns)
    except (RuntimeError, ValueError):
        _check_same_kind(columns, name)
        raise


def _are_joinable_unread(columns: Sequence[Any]) -> bool:
    """Return whether all columns are ``Unread`` and agree in dtype and in shape without dim 0."""
    first = columns[0]
    return all(
        type(column) is Unread and column.dtype is first.dtype and column.array.shape[1:] == first.array.shape[1:]
        for column in columns
    )


def _join_unread(columns: Sequence[Any], concat: ConcatTensors) -> Tensor:
    """Join columns that agree, straight from the shared memory if none of them has been read."""
    if set(map(type, columns)) != {Unread}:
        return concat(read_columns(columns))
    parts = [column.array for column in columns]
    joined = np.concatenate(parts, out=np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype))
    return torch.from_numpy(joined).view(columns[0].dtype)


def _are_plain(columns: Sequence[Any]) -> bool:
    """Return whether all columns are ordinary tensors of one dtype; torch itself then rejects other differences."""
    if set(map(type, columns)) != PLAIN:
        return False
    dtype = columns[0].dtype
    return all([column.dtype is dtype for column in columns])


def _reordered(batch: Batch, names: tuple[str, ...]) -> Columns:
    tensors = dict(batch.items())
    return columns_like(batch, {key: tensors[key] for key in names}, batch.batch_size[0])


def _check_same_names(parts: Sequence[Batch], name: str) -> None:
    expected = sorted(column_names(parts[0]))
    for position, part in enumerate(parts):
        found = sorted(column_names(part))
        if found != expected:
            raise DataError(
                f"{name or 'batch'} of part {position} has columns {found}, of part 0 {expected}: "
                "all parts must have the same columns",
                column=name,
                part=position,
                columns=found,
                expected=expected,
            )


def _check_same_kind(columns: Sequence[Any], name: str) -> None:
    first = column_kind(columns[0])
    for position, column in enumerate(columns):
        if column_kind(column) != first:
            found, expected = describe_column(column), describe_column(columns[0])
            raise DataError(
                f"column {name!r} of part {position} is {found}, of part 0 {expected}: only dim 0 may differ",
                column=name,
                part=position,
                found=found,
                expected=expected,
            )
