"""Row operations on the columns of a batch: views where torch can give them, copies where rows move.

A column is a tensor whose dim 0 counts rows, a jagged nested tensor of that many rows, or a nested ``TensorDict``.
Jagged columns that shared their offsets before an operation share them after it, so that arithmetic between them
stays legal: the ``memo`` that goes along keeps the new offsets by the identity of the old ones.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.tensordicts import is_tensordict, make_tensordict
from mcontroller.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

Memo = dict[Any, tuple[Tensor, Any]]  # key -> new offsets, and the old ones, kept alive while their ids are keys

_LARGE = 4 << 20

_ONE_THREAD = (256 << 10, 64 << 20)
"""Sizes of a joined column between which torch uses several threads, and one is nearly as fast."""

_PLAIN = {Tensor}

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes, the dtype whose elements every operation can move, for those that some cannot."""

_INDEXED = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16}
    | {torch.float32, torch.float64, torch.complex64, torch.complex128}
)


Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype of a column that is an ordinary tensor, and its shape but for dim 0."""


class Schema(NamedTuple):
    """What is the same in all parts of a batch: its columns' names, its batch dims after dim 0, its device.

    ``plain``: every column is an ordinary tensor, and batches that have the same schema object agree in dtypes and
    shapes too: they can be joined without a look at their columns.
    """

    names: tuple[str, ...]
    inner: tuple[int, ...]
    device: torch.device | None
    plain: bool = False

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(
        names: tuple[str, ...], inner: tuple[int, ...], device: torch.device | None, kinds: tuple[Kind, ...]
    ) -> Schema:
        """Of plain columns of these kinds: one object for the same values, while they are among the last asked for."""
        return Schema(names, inner, device, plain=True)


class Unread(NamedTuple):
    """A column that has arrived in memory which others read too: ``array`` must not be written, nor shown to a user."""

    array: np.ndarray
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        return torch.from_numpy(self.array.copy()).view(self.dtype)


class Columns:
    """The columns of a batch that nobody has asked for as a TensorDict yet, in the schema's order.

    A TensorDict costs more to make than a small batch to split or join. It is never changed, so that batches share it.
    A column may be given as ``Unread``: it is copied when it is first asked for, and joined with others as it is.
    """

    __slots__ = ("_columns", "has_unread", "rows", "schema")

    def __init__(self, schema: Schema, columns: tuple[Any, ...], rows: int, has_unread: bool = False) -> None:
        self.schema = schema
        self._columns = columns
        self.rows = rows
        self.has_unread = has_unread

    @property
    def tensors(self) -> tuple[Any, ...]:
        if self.has_unread:
            self._columns, self.has_unread = tuple(_read(self._columns)), False
        return self._columns

    @property
    def unread(self) -> tuple[Any, ...]:
        """The columns as they are given: for joining, and no other use."""
        return self._columns

    @property
    def batch_size(self) -> tuple[int, ...]:
        return (self.rows, *self.schema.inner)

    @property
    def device(self) -> torch.device | None:
        return self.schema.device

    def items(self) -> Iterable[tuple[str, Any]]:
        return zip(self.schema.names, self.tensors, strict=True)

    def values(self) -> Iterable[Any]:
        return self.tensors

    def tensordict(self) -> TensorDict:
        """A TensorDict of these columns, which are not checked again."""
        return make_tensordict(dict(self.items()), self.batch_size, self.device, check=False)


if TYPE_CHECKING:
    Batch = TensorDict | Columns
    AnyBatch = TypeVar("AnyBatch", TensorDict | None, Batch | None)


def leaves(batch: Batch | None) -> Iterator[Tensor]:
    """Every tensor of a batch, nested ones too."""
    for value in () if batch is None else batch.values():
        if isinstance(value, Tensor):
            yield value
        elif is_tensordict(value):
            yield from leaves(value)


def is_jagged(column: Any) -> bool:
    return isinstance(column, Tensor) and column.is_nested and column.layout == torch.jagged


def like(source: Batch, columns: Mapping[str, Any], rows: int) -> Columns:
    """``columns`` with ``source``'s device and batch dims, dim 0 being ``rows`` long."""
    return make(columns, (rows, *source.batch_size[1:]), source.device)


def make(columns: Mapping[str, Any], batch_size: Sequence[int], device: torch.device | None = None) -> Columns:
    """Columns that are known to fit each other and ``batch_size``."""
    held, inner = tuple(columns.values()), tuple(batch_size[1:])
    if set(map(type, held)) == _PLAIN:
        kinds = tuple([(column.dtype, tuple(column.shape[1:])) for column in held])
        return Columns(Schema.of(tuple(columns), inner, device, kinds), held, batch_size[0])
    return Columns(Schema(tuple(columns), inner, device), held, batch_size[0])


def each(batch: Batch, change: Callable[[Any], Any]) -> Columns:
    """Every column as ``change`` gives it, with as many rows as before."""
    return like(batch, {key: change(value) for key, value in batch.items()}, batch.batch_size[0])


def moved(batch: Batch, device: torch.device) -> Columns:
    """The columns on ``device``; those that are there already as they are."""
    return make({key: value.to(device) for key, value in batch.items()}, batch.batch_size, device)


def shallow(batch: AnyBatch) -> AnyBatch:
    """The same tensors in a batch of their own, so that adding or dropping a column is not seen elsewhere."""
    return batch.copy() if is_tensordict(batch) else batch


def split_rows(batch: Batch, sizes: Sequence[int], memo: Memo | None = None) -> list[Columns]:
    """Consecutive parts of ``sizes`` rows each, as views."""
    memo = {} if memo is None else memo
    if type(batch) is Columns:
        schema, held = batch.schema, batch.tensors
    else:
        held = tuple(batch.values())
        schema = Schema(_names(batch), tuple(batch.batch_size[1:]), batch.device, set(map(type, held)) == _PLAIN)
    pieces = [_split(value, sizes, memo) for value in held]
    parts = zip(*pieces, strict=True) if pieces else [()] * len(sizes)
    return [Columns(schema, part, size) for part, size in zip(parts, sizes, strict=True)]


def slice_rows(batch: Batch, start: int, stop: int, step: int = 1, memo: Memo | None = None) -> Columns:
    """Rows ``start:stop:step`` with ``0 <= start <= stop`` and ``step > 0``, as views (jagged: if step is 1)."""
    memo = {} if memo is None else memo
    tensors = {key: _slice(value, start, stop, step, memo) for key, value in batch.items()}
    return like(batch, tensors, len(range(start, stop, step)))


def take_rows(batch: Batch, index: Tensor, memo: Memo | None = None) -> Columns:
    """The rows named by ``index`` (int64, each in ``[0, rows)``, repeats allowed), as a copy."""
    memo = {} if memo is None else memo
    return like(batch, {key: _take(value, index, memo) for key, value in batch.items()}, len(index))


def join_rows(
    parts: Sequence[Batch], name: str = "", memo: Memo | None = None, *, spare_cores: bool = False
) -> Columns:
    """The rows of all parts in order, as a copy; DataError names the column, parts and shapes that do not fit.

    ``spare_cores`` leaves them to the processes beside this one, where that costs this one little.
    """
    first = parts[0]
    if type(first) is Columns and first.schema.plain:
        schema = first.schema
        if all([type(part) is Columns and part.schema is schema for part in parts]):
            with suppress(RuntimeError, ValueError):  # on several devices, say: told below
                return _join_alike(parts, spare_cores)
    memo = {} if memo is None else memo
    names = _names(first)
    if any([_names(part) != names for part in parts]):
        _check_same_keys(parts, name)
        parts = [_ordered(part, names) for part in parts]
    rows = [part.batch_size[0] for part in parts]
    check = 0 in rows  # torch.cat takes an empty column of any shape
    held: Any = zip(*[part.unread if type(part) is Columns else part.values() for part in parts], strict=True)
    prefix = f"{name}." if name else ""
    joined = [_join(column, prefix + key, memo, check, spare_cores) for key, column in zip(names, held, strict=False)]
    return like(first, dict(zip(names, joined, strict=True)), sum(rows))


def _join_alike(parts: Sequence[Any], spare_cores: bool) -> Columns:
    """Parts of one schema, whose columns are alike: nothing needs to be compared."""
    columns = zip(*[part.unread for part in parts], strict=True)
    if any([part.has_unread for part in parts]):
        joined = tuple([_join_unread(column, spare_cores) for column in columns])
    else:
        joined = tuple([_cat_beside(column) if spare_cores else _cat(column, 0) for column in columns])
    return Columns(parts[0].schema, joined, sum([part.rows for part in parts]))


def _names(batch: Batch) -> tuple[str, ...]:
    return batch.schema.names if type(batch) is Columns else tuple([key for key, _ in batch.items()])


def _ordered(batch: Batch, names: tuple[str, ...]) -> Columns:
    held = dict(batch.items())
    return like(batch, {key: held[key] for key in names}, batch.batch_size[0])


def reshape_rows(batch: Batch | None, reshape: Callable[[Any], Any], rows: int) -> TensorDict | None:
    """Every tensor reshaped, to ``rows`` rows; DataError names a jagged column, which cannot be."""
    if batch is None:
        return None
    reshaped: dict[str, Any] = {}
    for key, value in batch.items():
        if is_jagged(value):
            raise DataError(f"column {key!r} is jagged: its batch dim cannot be reshaped", column=key)
        reshaped[key] = reshape_rows(value, reshape, rows) if is_tensordict(value) else reshape(value)
    return make_tensordict(reshaped, (rows,), batch.device)


def stack_rows(items: Sequence[TensorDict | None]) -> TensorDict | None:
    """Single rows as one batch, as a copy."""
    if items[0] is None:
        return None
    for key, value in items[0].items():
        for position, item in enumerate(items):
            found = item.get(key, None) if item is not None else None
            if describe(found) != describe(value):
                raise DataError(
                    f"column {key!r} of row {position} is {describe(found)}, of row 0 {describe(value)}: "
                    "rows of one batch must have one shape and dtype",
                    column=key,
                    row=position,
                )
    stacked: Any = torch.stack(items)  # type: ignore[arg-type]
    return stacked.contiguous()


def _split(column: Any, sizes: Sequence[int], memo: Memo) -> Sequence[Any]:
    if type(column) is Tensor:
        return column.split_with_sizes(sizes)
    if is_tensordict(column):
        return [part.tensordict() for part in split_rows(column, sizes, memo)]
    if is_jagged(column):
        stops = itertools.accumulate(sizes)
        return [_slice_jagged(column, stop - size, stop, memo) for stop, size in zip(stops, sizes, strict=True)]
    return column.split_with_sizes(sizes)


def _slice(column: Any, start: int, stop: int, step: int, memo: Memo) -> Any:
    if is_tensordict(column):
        return slice_rows(column, start, stop, step, memo).tensordict()
    if is_jagged(column):
        if step != 1:
            return _take_jagged(column, torch.arange(start, stop, step), memo)
        return _slice_jagged(column, start, stop, memo)
    return column[start:stop:step]


def _take(column: Any, index: Tensor, memo: Memo) -> Any:
    if is_tensordict(column):
        return take_rows(column, index, memo).tensordict()
    if is_jagged(column):
        return _take_jagged(column, index, memo)
    return _index_select(column, 0, index)


def _join(columns: Sequence[Any], name: str, memo: Memo, check: bool, spare_cores: bool) -> Any:
    if Unread in set(map(type, columns)):
        if _fit(columns):
            return _join_unread(columns, spare_cores)
        columns = _read(columns)
    if check or not _are_plain(columns):
        _check_same_kind(columns, name)
        if is_tensordict(columns[0]):
            return join_rows(columns, name, memo, spare_cores=spare_cores).tensordict()
        if is_jagged(columns[0]):
            return _join_jagged(columns, memo)
    try:
        return _cat_beside(columns) if spare_cores else _cat(columns, 0)
    except (RuntimeError, ValueError):
        _check_same_kind(columns, name)
        raise


def _fit(columns: Sequence[Any]) -> bool:
    """Whether all are ``Unread``, of one dtype and but for their rows of one shape."""
    first = columns[0]
    return all(
        type(column) is Unread and column.dtype is first.dtype and column.array.shape[1:] == first.array.shape[1:]
        for column in columns
    )


def _join_unread(columns: Sequence[Any], spare_cores: bool) -> Tensor:
    """Columns that fit, from where they lie if nobody has read any of them."""
    if set(map(type, columns)) != {Unread}:
        columns = _read(columns)
        return _cat_beside(columns) if spare_cores else _cat(columns, 0)
    parts = [column.array for column in columns]
    joined = np.concatenate(parts, out=np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype))
    return torch.from_numpy(joined).view(columns[0].dtype)


def _read(columns: Sequence[Any]) -> list[Any]:
    return [column.tensor() if type(column) is Unread else column for column in columns]


def _are_plain(columns: Sequence[Any]) -> bool:
    """Whether these are plain tensors of one dtype, so that torch itself refuses the rest of what must not differ."""
    if set(map(type, columns)) != _PLAIN:
        return False
    dtype = columns[0].dtype
    return all([column.dtype is dtype for column in columns])


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    if tensors[0].nbytes * len(tensors) < _LARGE:  # as good as their sum, and cheaper
        return torch.cat(tensors, dim=dim)  # type: ignore[arg-type]
    shape = list(tensors[0].shape)
    shape[dim] = sum([tensor.shape[dim] for tensor in tensors])
    return torch.cat(tensors, dim=dim, out=_huge_pages(tensors, shape))  # type: ignore[arg-type]


def _cat_beside(tensors: Sequence[Tensor]) -> Tensor:
    """As ``_cat`` along dim 0, on one thread: those of torch spin for milliseconds after it and wait for more."""
    least, most = _ONE_THREAD
    if not (least <= tensors[0].nbytes * len(tensors) <= most and all(map(_in_memory, tensors))):
        return _cat(tensors, 0)
    dtype, shape = tensors[0].dtype, list(tensors[0].shape)
    shape[0] = sum([tensor.shape[0] for tensor in tensors])
    parts = [tensor.view(BITS[dtype.itemsize]).numpy() for tensor in tensors]
    joined = np.concatenate(parts, out=np.empty(shape, parts[0].dtype))
    return torch.from_numpy(joined).view(dtype)


def _in_memory(tensor: Tensor) -> bool:
    """Whether its bytes are all that there is to it, and numpy can move them."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype.itemsize in BITS
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


def _index_select(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    if tensor.dtype not in _INDEXED:
        return _index_select(tensor.view(BITS[tensor.dtype.itemsize]), dim, index).view(tensor.dtype)
    shape = list(tensor.shape)
    shape[dim] = len(index)
    return torch.index_select(tensor, dim, index.to(tensor.device), out=_huge_pages([tensor], shape))


def _huge_pages(sources: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """Memory for a large result on the CPU from numpy, which asks the kernel for huge pages, as torch does not.

    New memory of 100 MB costs more to map in pages of 4 KiB than to fill. None where it does not matter or apply.
    """
    first = sources[0]
    size = first.dtype.itemsize * math.prod(shape)
    if size < _LARGE or first.device.type != "cpu" or any(source.requires_grad for source in sources):
        return None
    return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(first.dtype).view(shape)


def _check_same_keys(parts: Sequence[Batch], name: str) -> None:
    expected = sorted(_names(parts[0]))
    for position, part in enumerate(parts):
        found = sorted(_names(part))
        if found != expected:
            raise DataError(
                f"{name or 'batch'} of part {position} has columns {found}, of part 0 {expected}: "
                "give every part the same columns",
                column=name,
                part=position,
                columns=found,
                expected=expected,
            )


def _kind(column: Any) -> tuple[Any, ...]:
    if not isinstance(column, Tensor):
        return (type(column).__name__,)
    ragged = column._ragged_idx if is_jagged(column) else None  # type: ignore[attr-defined]
    shape = tuple(size for dim, size in enumerate(column.shape[1:], start=1) if dim != ragged)
    return column.dtype, column.device, shape, ragged


def _check_same_kind(columns: Sequence[Any], name: str) -> None:
    first = _kind(columns[0])
    for position, column in enumerate(columns):
        if _kind(column) != first:
            raise DataError(
                f"column {name!r} of part {position} is {describe(column)}, of part 0 {describe(columns[0])}: "
                "only dim 0 may differ",
                column=name,
                part=position,
                found=describe(column),
                expected=describe(columns[0]),
            )


def describe(column: Any) -> str:
    """Dtype and shape of a column for people: ``int64[8, 16]``, with the device where it is not the CPU."""
    if is_tensordict(column) or isinstance(column, Columns):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in column.items()) + "}"
    if isinstance(column, np.ndarray):
        return f"{column.dtype}[{', '.join(map(str, column.shape))}]"
    if not isinstance(column, Tensor):
        return type(column).__name__
    ragged = column._ragged_idx if is_jagged(column) else None  # type: ignore[attr-defined]
    shape = ", ".join("*" if dim == ragged else str(size) for dim, size in enumerate(column.shape))
    place = "" if column.device.type == "cpu" else f" on {column.device}"
    return f"{str(column.dtype).removeprefix('torch.')}[{shape}]{place}"


def readable(size: float) -> str:
    """Bytes with a unit: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def nbytes(column: Any) -> int:
    """Bytes of a column's own elements, whatever storage they are a view of."""
    if is_tensordict(column) or isinstance(column, Columns):
        return sum(nbytes(value) for value in column.values())
    if is_jagged(column):
        values, offsets, _ = packed(column)
        return values.nbytes + offsets.nbytes
    return column.nbytes


def same(left: Any, right: Any) -> bool:
    """Whether two columns agree in type, dtype, shape and every value, NaN being equal to NaN."""
    if left is right:
        return True
    if is_tensordict(left) and is_tensordict(right):
        return left.batch_size == right.batch_size and same_mapping(left, right, same)
    if is_tensordict(left) or is_tensordict(right):
        return False
    if left.dtype != right.dtype or _kind(left)[2:] != _kind(right)[2:] or left.shape[:1] != right.shape[:1]:
        return False
    if is_jagged(left):
        return all(same(a, b) for a, b in zip(packed(left)[:2], packed(right)[:2], strict=True))
    left, right = left.detach().cpu(), right.detach().cpu()
    if left.dtype.is_floating_point and left.dtype.itemsize == 1:
        left, right = left.float(), right.float()
    if torch.equal(left, right):
        return True
    return bool(((left == right) | ((left != left) & (right != right))).all())


def same_mapping(left: Any, right: Any, same_value: Callable[[Any, Any], bool]) -> bool:
    if set(left.keys()) != set(right.keys()):
        return False
    return all(same_value(value, right.get(key)) for key, value in left.items())


def packed(column: Tensor) -> tuple[Tensor, Tensor, int]:
    """``values`` without holes, ``offsets`` from 0 to their length, and the ragged dim of a jagged column."""
    if column.lengths() is not None:  # type: ignore[attr-defined]
        column = column.contiguous()
    values, offsets = column.values(), column.offsets()  # type: ignore[attr-defined]
    ragged = column._ragged_idx  # type: ignore[attr-defined]
    begin, end = int(offsets[0]), int(offsets[-1])
    if begin:
        offsets = offsets - begin
    if end - begin != values.shape[ragged - 1]:
        values = values.narrow(ragged - 1, begin, end - begin)
    return values, offsets, ragged


def jagged(values: Tensor, offsets: Tensor, ragged: int) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged)


def _slice_jagged(column: Tensor, start: int, stop: int, memo: Memo) -> Tensor:
    values, offsets, ragged = packed(column)
    begin, end = int(offsets[start]), int(offsets[stop])
    key = (id(offsets), start, stop)
    if key not in memo:
        memo[key] = offsets[start : stop + 1] - begin, offsets
    return jagged(values.narrow(ragged - 1, begin, end - begin), memo[key][0], ragged)


def _take_jagged(column: Tensor, index: Tensor, memo: Memo) -> Tensor:
    values, offsets, ragged = packed(column)
    index = index.to(offsets.device)
    lengths = offsets.diff()[index]
    key = id(offsets)
    if key not in memo:
        memo[key] = _offsets(lengths), offsets
    new_offsets = memo[key][0]
    shift = (offsets[:-1][index] - new_offsets[:-1]).repeat_interleave(lengths)
    elements = shift + torch.arange(len(shift), device=shift.device)
    return jagged(_index_select(values, ragged - 1, elements), new_offsets, ragged)


def _join_jagged(columns: Sequence[Tensor], memo: Memo) -> Tensor:
    values, offsets, ragged = zip(*(packed(column) for column in columns), strict=True)
    key = tuple(id(part) for part in offsets)
    if key not in memo:
        memo[key] = _offsets(torch.cat([part.diff() for part in offsets])), offsets
    return jagged(_cat(values, ragged[0] - 1), memo[key][0], ragged[0])


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
