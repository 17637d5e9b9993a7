"""Row operations on the columns of a batch, and the union of columns: views if torch can make them, else copies.

Jagged columns that share their offsets keep sharing them after an operation, because torch allows arithmetic only
between jagged tensors with the same offsets object. The functions that move rows take a ``memo`` for this: it maps the
identity of the old offsets to the new ones. Pass one memo to all columns of an operation.

A large result on the CPU gets its memory from numpy, which asks the kernel for huge pages; torch does not. Mapping new
memory in pages of 4 KiB takes longer than filling it. Measured on 2 cores, medians of 60 calls, four columns in 8
parts: at 120 MB, ``DataProto.concat`` takes 18.9 ms instead of 28.2 ms, and ``select_idxs`` with a random order 16.9 ms
instead of 33.6 ms; up to 30 MB there is no difference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.columns import (
    PLAIN,
    Columns,
    Schema,
    Unread,
    column_kind,
    column_names,
    columns_like,
    describe_column,
    is_jagged,
    make_jagged,
    packed_parts,
    read_columns,
    same_column,
    shallow_copy,
)
from mcontroller.data.meta import same_array
from mcontroller.data.tensordicts import is_tensordict, make_tensordict
from mcontroller.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from mcontroller.data.columns import Batch

OffsetsMemo = dict[Any, tuple[Tensor, Any]]
"""New offsets by the identity of the old ones; the old ones are kept too, so that their ids stay valid."""

ConcatTensors = Callable[[Sequence[Tensor]], Tensor]
"""Concatenates tensors along dim 0."""

LARGE_BYTES = 4 << 20
"""From this size on, a result is allocated in huge pages, and torch copies with several threads."""

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of each element size in bytes. Every operation supports it; some do not support every dtype."""

_SELECTABLE = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16}
    | {torch.float32, torch.float64, torch.complex64, torch.complex128}
)


def concat_tensors(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors along ``dim``, as ``torch.cat`` does."""
    if tensors[0].nbytes * len(tensors) < LARGE_BYTES:  # an estimate of the result's size that costs little
        return torch.cat(tensors, dim=dim)  # type: ignore[arg-type]
    shape = list(tensors[0].shape)
    shape[dim] = sum([tensor.shape[dim] for tensor in tensors])
    return torch.cat(tensors, dim=dim, out=_huge_pages(tensors, shape))  # type: ignore[arg-type]


def concat_on_one_thread(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along dim 0 without torch's threads, for a process whose node is busy.

    The threads of ``torch.cat`` wait for each other, and spin for milliseconds after it. Measured on 2 cores, medians,
    four columns in 8 parts, one thread against torch's threads: while other processes keep the cores busy, 15 MB take
    4.2 ms against 109 ms, and 120 MB 27 ms against 189 ms. On idle cores, one thread is slower: 2.6 ms against 1.7 ms,
    and 27.6 ms against 18.9 ms. Below ``LARGE_BYTES``, torch is as fast or faster in both cases.
    """
    size = tensors[0].nbytes * len(tensors)
    if size < LARGE_BYTES or not all(map(_is_plain_memory, tensors)):
        return concat_tensors(tensors)
    dtype, shape = tensors[0].dtype, list(tensors[0].shape)
    shape[0] = sum([tensor.shape[0] for tensor in tensors])
    parts = [tensor.view(INTEGER_OF_SIZE[dtype.itemsize]).numpy() for tensor in tensors]
    return torch.from_numpy(np.concatenate(parts, out=np.empty(shape, parts[0].dtype))).view(dtype)


def _is_plain_memory(tensor: Tensor) -> bool:
    """Return whether numpy can copy the tensor as integers, without losing anything."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype.itemsize in INTEGER_OF_SIZE
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


def index_select(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """Select entries along ``dim`` of a tensor of any dtype, as ``torch.index_select`` does for most."""
    if tensor.dtype not in _SELECTABLE:
        return index_select(tensor.view(INTEGER_OF_SIZE[tensor.dtype.itemsize]), dim, index).view(tensor.dtype)
    shape = list(tensor.shape)
    shape[dim] = len(index)
    return torch.index_select(tensor, dim, index.to(tensor.device), out=_huge_pages([tensor], shape))


def _huge_pages(sources: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """Allocate a large result on the CPU in huge pages; None if torch should allocate it."""
    first = sources[0]
    size = first.dtype.itemsize * math.prod(shape)
    if size < LARGE_BYTES or first.device.type != "cpu" or any(source.requires_grad for source in sources):
        return None
    return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(first.dtype).view(shape)


# ---- rows of all columns --------------------------------------------------------------------------------------------


def split_columns(batch: Batch, sizes: Sequence[int], memo: OffsetsMemo | None = None) -> list[Columns]:
    """Split a batch into consecutive parts of ``sizes`` rows each, as views.

    Args:
        batch: the batch.
        sizes: number of rows of every part; their sum is the number of rows of the batch.
        memo: shared offsets of jagged columns, see the module.
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
        batch: the batch.
        start: first row, ``0 <= start <= stop``.
        stop: end of the rows, exclusive.
        step: distance between rows, at least 1.
        memo: shared offsets of jagged columns, see the module.
    """
    memo = {} if memo is None else memo
    tensors = {key: _slice(value, start, stop, step, memo) for key, value in batch.items()}
    return columns_like(batch, tensors, len(range(start, stop, step)))


def take_rows(batch: Batch, index: Tensor, memo: OffsetsMemo | None = None) -> Columns:
    """Return the rows at ``index`` as a copy.

    Args:
        batch: the batch.
        index: row numbers, int64 ``[rows]``, each at least 0; repeats are allowed.
        memo: shared offsets of jagged columns, see the module.
    """
    memo = {} if memo is None else memo
    return columns_like(batch, {key: _take(value, index, memo) for key, value in batch.items()}, len(index))


def join_rows(
    parts: Sequence[Batch], name: str = "", memo: OffsetsMemo | None = None, concat: ConcatTensors = concat_tensors
) -> Columns:
    """Concatenate the rows of all parts, as a copy.

    Args:
        parts: at least one batch; all must have the same columns, which may differ in dim 0 only.
        name: name of the parts in error messages, if they are nested in a column.
        memo: shared offsets of jagged columns, see the module.
        concat: function that concatenates ordinary tensors.

    Raises:
        DataError: if parts differ in columns, dtypes or shapes; names the column and the part.
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
        DataError: if a column is jagged; names it.
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
        DataError: if rows differ in dtype or shape of a column; names the column and the row.
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


# ---- jagged columns -------------------------------------------------------------------------------------------------


def slice_jagged(column: Tensor, start: int, stop: int, memo: OffsetsMemo) -> Tensor:
    """Return rows ``start:stop`` as a view."""
    values, offsets, ragged = packed_parts(column)
    begin, end = int(offsets[start]), int(offsets[stop])
    key = (id(offsets), start, stop)
    if key not in memo:
        memo[key] = offsets[start : stop + 1] - begin, offsets
    return make_jagged(values.narrow(ragged - 1, begin, end - begin), memo[key][0], ragged)


def take_jagged(column: Tensor, index: Tensor, memo: OffsetsMemo) -> Tensor:
    """Return the rows at ``index`` (int64 ``[rows]``) as a copy."""
    values, offsets, ragged = packed_parts(column)
    index = index.to(offsets.device)
    lengths = offsets.diff()[index]
    key = id(offsets)
    if key not in memo:
        memo[key] = _offsets(lengths), offsets
    new_offsets = memo[key][0]
    shift = (offsets[:-1][index] - new_offsets[:-1]).repeat_interleave(lengths)
    elements = shift + torch.arange(len(shift), device=shift.device)
    return make_jagged(index_select(values, ragged - 1, elements), new_offsets, ragged)


def join_jagged(columns: Sequence[Tensor], memo: OffsetsMemo) -> Tensor:
    """Concatenate the rows of jagged columns of the same ragged dim, as a copy."""
    values, offsets, ragged = zip(*map(packed_parts, columns), strict=True)
    key = tuple(map(id, offsets))
    if key not in memo:
        memo[key] = _offsets(torch.cat([part.diff() for part in offsets])), offsets
    return make_jagged(concat_tensors(values, ragged[0] - 1), memo[key][0], ragged[0])


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


# ---- union ----------------------------------------------------------------------------------------------------------


def union_tensor_dict(tensor_dict1: TensorDict | None, tensor_dict2: TensorDict | None) -> TensorDict | None:
    """Unite the columns of two TensorDicts, sharing their tensors.

    Args:
        tensor_dict1: the first TensorDict; its columns come first. None counts as one without columns.
        tensor_dict2: the second TensorDict, with the same batch dims.

    Raises:
        DataError: if the batch dims differ, or a column of both differs in dtype, shape or values.
    """
    united = union_columns(tensor_dict1, tensor_dict2)
    return united if united is None or is_tensordict(united) else united.tensordict()


def union_columns(left: Batch | None, right: Batch | None) -> Batch | None:
    """Unite the columns of two batches, on the device of the first if it has one.

    Raises:
        DataError: if the batch dims differ, or a column of both differs in dtype, shape or values.
    """
    if left is None or right is None:
        return shallow_copy(right if left is None else left)
    if tuple(left.batch_size) != tuple(right.batch_size):
        sizes = (list(left.batch_size), list(right.batch_size))
        raise DataError(f"union of batch dims {sizes[0]} and {sizes[1]}: they must be equal", batch_sizes=sizes)
    united = dict(left.items())
    for key, value in right.items():
        if key in united and not same_column(united[key], value):
            raise _differs(key, united[key], value)
        united.setdefault(key, value if left.device is None else value.to(left.device))
    return columns_like(left, united, left.batch_size[0])


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Unite two dicts of numpy columns, sharing their arrays.

    Args:
        tensor_dict1: the first dict; its columns come first.
        tensor_dict2: the second dict.

    Raises:
        DataError: if a column of both differs in dtype, shape or values.
    """
    united = dict(tensor_dict1)
    for key, value in tensor_dict2.items():
        if key in united and not same_array(united[key], value):
            raise _differs(key, united[key], value)
        united.setdefault(key, value)
    return united


def _differs(key: str, first: Any, second: Any) -> DataError:
    return DataError(
        f"union: column {key!r} is in both batches and differs ({describe_column(first)} and "
        f"{describe_column(second)}): pop or rename one of them",
        column=key,
    )
