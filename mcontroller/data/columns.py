"""The tensors of a batch without a TensorDict: creating one costs more than splitting or joining a small batch.

A column is a tensor whose dim 0 counts rows, a jagged nested tensor of that many rows, or a nested TensorDict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

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
        names: Names of the columns.
        inner: Batch dims after dim 0.
        device: Device of all columns; None if they need not share one.
        plain: Whether every column is an ordinary tensor. Batches with the same schema object then agree in dtypes and
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
        array: The elements, as integers of the same size if numpy lacks the dtype. Never returned to a user.
        dtype: Dtype of the column.
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
        schema: Names, inner batch dims and device.
        rows: Number of rows.
        has_unread: Whether some columns are ``Unread``.
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
    """Yield every tensor of a batch, those of nested TensorDicts included."""
    for value in () if batch is None else batch.values():
        if isinstance(value, Tensor):
            yield value
        elif is_tensordict(value):
            yield from leaf_tensors(value)
