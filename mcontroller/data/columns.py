"""The tensors of a batch without a TensorDict: creating one costs more than splitting or joining a small batch.

A column is a tensor whose dim 0 counts rows, a jagged nested tensor of that many rows, or a nested TensorDict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.tensordicts import is_tensordict, make_tensordict

if TYPE_CHECKING:
    from tensordict import TensorDict

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype of a column that is an ordinary tensor, and its shape without dim 0."""

PLAIN = {Tensor}
"""The set of types of columns that are all ordinary tensors."""


class Schema(NamedTuple):
    """What all parts of a batch have in common.

    Attributes:
        names: names of the columns.
        inner: batch dims after dim 0.
        device: device of all columns; None if they need not share one.
        plain: whether every column is an ordinary tensor. Batches with the same schema object then agree in dtypes and
            shapes too, and can be joined without comparing their columns.
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
        """Return the schema of plain columns of these kinds: the same object for the same values."""
        return Schema(names, inner, device, plain=True)


class Unread(NamedTuple):
    """A received column in read-only memory that other processes share, such as Ray's object store.

    Attributes:
        array: the elements, as integers of the same size if numpy lacks the dtype. Never returned to a user.
        dtype: dtype of the column.
    """

    array: np.ndarray
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Return a private copy as a tensor."""
        return torch.from_numpy(self.array.copy()).view(self.dtype)


class Columns:
    """The columns of a batch whose TensorDict has not been needed yet, in the order of the schema.

    Immutable for its users, so that batches can share it. A column may be ``Unread``: it is copied at the first access
    through ``tensors``, and joined with others without that copy.

    Attributes:
        schema: names, inner batch dims and device.
        rows: number of rows.
        has_unread: whether some columns are ``Unread``.
    """

    __slots__ = ("_columns", "has_unread", "rows", "schema")

    def __init__(self, schema: Schema, columns: tuple[Any, ...], rows: int, has_unread: bool = False) -> None:
        self.schema = schema
        self._columns = columns
        self.rows = rows
        self.has_unread = has_unread

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The columns; those that are ``Unread`` are copied at the first access."""
        if self.has_unread:
            self._columns, self.has_unread = tuple(read_columns(self._columns)), False
        return self._columns

    @property
    def unread(self) -> tuple[Any, ...]:
        """The columns without copying those that are ``Unread``: for joining, and no other use."""
        return self._columns

    @property
    def batch_size(self) -> tuple[int, ...]:
        """The leading dims that all columns share, dim 0 being the rows."""
        return (self.rows, *self.schema.inner)

    @property
    def device(self) -> torch.device | None:
        """Device of all columns; None if they need not share one."""
        return self.schema.device

    def items(self) -> Iterable[tuple[str, Any]]:
        """Return pairs of name and column."""
        return zip(self.schema.names, self.tensors, strict=True)

    def values(self) -> Iterable[Any]:
        """Return the columns."""
        return self.tensors

    def tensordict(self) -> TensorDict:
        """Return a TensorDict of the columns; they are not checked again."""
        return make_tensordict(dict(self.items()), self.batch_size, self.device, check=False)


if TYPE_CHECKING:
    Batch: TypeAlias = TensorDict | Columns
    AnyBatch = TypeVar("AnyBatch", TensorDict | None, Batch | None)


def read_columns(columns: Sequence[Any]) -> list[Any]:
    """Return the columns, with a private copy of each that is ``Unread``."""
    return [column.tensor() if type(column) is Unread else column for column in columns]


def make_columns(tensors: Mapping[str, Any], batch_size: Sequence[int], device: torch.device | None = None) -> Columns:
    """Make columns from tensors that agree with ``batch_size`` and ``device``; this is not checked."""
    values, inner = tuple(tensors.values()), tuple(batch_size[1:])
    if set(map(type, values)) == PLAIN:
        kinds = tuple([(column.dtype, tuple(column.shape[1:])) for column in values])
        return Columns(Schema.of(tuple(tensors), inner, device, kinds), values, batch_size[0])
    return Columns(Schema(tuple(tensors), inner, device), values, batch_size[0])


def columns_like(source: Batch, tensors: Mapping[str, Any], rows: int) -> Columns:
    """Make columns of ``rows`` rows with the device and the inner batch dims of ``source``."""
    return make_columns(tensors, (rows, *source.batch_size[1:]), source.device)


def map_columns(batch: Batch, change: Callable[[Any], Any]) -> Columns:
    """Apply a function that keeps the number of rows to every column."""
    return columns_like(batch, {key: change(value) for key, value in batch.items()}, batch.batch_size[0])


def columns_to(batch: Batch, device: torch.device) -> Columns:
    """Move the columns to ``device``; those that are there already are shared."""
    return make_columns({key: value.to(device) for key, value in batch.items()}, batch.batch_size, device)


def shallow_copy(batch: AnyBatch) -> AnyBatch:
    """Return a batch with the same tensors, to which columns can be added without changing the original."""
    return batch.copy() if is_tensordict(batch) else batch


def column_names(batch: Batch) -> tuple[str, ...]:
    """Return the names of the columns in their order."""
    return batch.schema.names if type(batch) is Columns else tuple([key for key, _ in batch.items()])


def leaf_tensors(batch: Batch | None) -> Iterator[Tensor]:
    """Yield every tensor of a batch, also of nested TensorDicts."""
    for value in () if batch is None else batch.values():
        if isinstance(value, Tensor):
            yield value
        elif is_tensordict(value):
            yield from leaf_tensors(value)


# ---- jagged columns -------------------------------------------------------------------------------------------------


def is_jagged(column: object) -> TypeGuard[Tensor]:
    """Return whether a column is a nested tensor of layout ``torch.jagged``."""
    return isinstance(column, Tensor) and column.is_nested and column.layout == torch.jagged


def ragged_dim(column: Tensor) -> int:
    """Return the dim of a jagged column whose size differs between rows."""
    return next(dim for dim, size in enumerate(column.shape) if isinstance(size, torch.SymInt))


def packed_parts(column: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the parts of a jagged column, without unused elements.

    Returns:
        The values of all rows next to each other, the offsets ``[batch + 1]`` from 0 to the number of values, and the
        ragged dim.
    """
    if column.lengths() is not None:  # type: ignore[attr-defined]
        column = column.contiguous()
    values: Tensor = column.values()
    offsets: Tensor = column.offsets()  # type: ignore[attr-defined]
    ragged = ragged_dim(column)
    begin, end = int(offsets[0]), int(offsets[-1])
    if begin:
        offsets = offsets - begin
    if end - begin != values.shape[ragged - 1]:
        values = values.narrow(ragged - 1, begin, end - begin)
    return values, offsets, ragged


def make_jagged(values: Tensor, offsets: Tensor, ragged: int) -> Tensor:
    """Make a jagged column from the parts that ``packed_parts`` returned."""
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged)


# ---- descriptions and comparison ------------------------------------------------------------------------------------


def describe_column(column: Any) -> str:
    """Return dtype and shape as text: ``int64[8, 16]``, ``float32[8, *] on cuda:0`` for a jagged column on a GPU."""
    if is_tensordict(column) or isinstance(column, Columns):
        return "{" + ", ".join(f"{key}: {describe_column(value)}" for key, value in column.items()) + "}"
    if isinstance(column, np.ndarray):
        return f"{column.dtype}[{', '.join(map(str, column.shape))}]"
    if not isinstance(column, Tensor):
        return type(column).__name__
    ragged = ragged_dim(column) if is_jagged(column) else None
    shape = ", ".join("*" if dim == ragged else str(size) for dim, size in enumerate(column.shape))
    device = "" if column.device.type == "cpu" else f" on {column.device}"
    return f"{str(column.dtype).removeprefix('torch.')}[{shape}]{device}"


def column_nbytes(column: Any) -> int:
    """Return the bytes of a column's own elements, also if it is a view of a larger storage."""
    if is_tensordict(column) or isinstance(column, Columns):
        return sum(column_nbytes(value) for value in column.values())
    if is_jagged(column):
        values, offsets, _ = packed_parts(column)
        return values.nbytes + offsets.nbytes
    return int(column.nbytes)


def column_kind(column: Any) -> tuple[Any, ...]:
    """Return what columns must have in common to be joined: dtype, device, shape without dim 0, ragged dim."""
    if not isinstance(column, Tensor):
        return (type(column).__name__,)
    ragged = ragged_dim(column) if is_jagged(column) else None
    shape = tuple(size for dim, size in enumerate(column.shape[1:], start=1) if dim != ragged)
    return column.dtype, column.device, shape, ragged


def same_column(left: Any, right: Any) -> bool:
    """Return whether two columns agree in type, dtype, shape and every value. NaN equals NaN; devices may differ."""
    if left is right:
        return True
    if is_tensordict(left) and is_tensordict(right):
        return left.batch_size == right.batch_size and same_mapping(left, right, same_column)
    if is_tensordict(left) or is_tensordict(right):
        return False
    if left.dtype != right.dtype or left.shape[:1] != right.shape[:1]:
        return False
    if column_kind(left)[2:] != column_kind(right)[2:]:
        return False
    if is_jagged(left):
        return all(same_column(a, b) for a, b in zip(packed_parts(left)[:2], packed_parts(right)[:2], strict=True))
    left, right = left.detach().cpu(), right.detach().cpu()
    if left.dtype.is_floating_point and left.dtype.itemsize == 1:
        left, right = left.float(), right.float()
    if torch.equal(left, right):
        return True
    return bool(((left == right) | ((left != left) & (right != right))).all())


def same_mapping(left: Any, right: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Return whether two mappings have the same keys, and values that ``same`` finds equal."""
    if set(left.keys()) != set(right.keys()):
        return False
    return all(same(value, right.get(key)) for key, value in left.items())


def format_bytes(size: float) -> str:
    """Format a number of bytes in decimal units: ``680 B``, ``1.5 kB``, ``120.0 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
