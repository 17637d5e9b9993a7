"""Describe, measure and compare columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.columns import Columns
from mcontroller.data.jagged import is_jagged, packed_parts, ragged_dim
from mcontroller.data.tensordicts import is_tensordict

__all__ = ["column_kind", "column_nbytes", "describe_column", "same_column", "same_mapping"]


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
