"""Row operations on jagged columns: nested tensors of layout ``torch.jagged``, one entry per row.

Jagged columns that share their offsets keep sharing them after an operation, because torch allows arithmetic only
between jagged tensors with the same offsets object. The functions that move rows take a ``memo`` for this: it maps the
identity of the old offsets to the new ones. Pass one memo to all columns of an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from mcontroller.data.copies import concat_tensors, index_select

__all__ = [
    "OffsetsMemo",
    "is_jagged",
    "join_jagged",
    "make_jagged",
    "packed_parts",
    "ragged_dim",
    "slice_jagged",
    "take_jagged",
]

OffsetsMemo = dict[Any, tuple[Tensor, Any]]
"""New offsets by the identity of the old ones; the old ones are kept too, so that their ids stay valid."""


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
