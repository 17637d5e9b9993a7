"""Functions over `DataProto`: padding to a divisor, folding of the batch dim, collation of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcontroller.data.batch import DataProto, DataProtoItem
from mcontroller.data.checks import as_array
from mcontroller.data.meta import copy_meta
from mcontroller.data.rows import stack_rows
from mcontroller.errors import DataError


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Pad a batch with rows from its start until ``size_divisor`` divides its number of rows.

    Args:
        data: the batch. One without rows is not padded.
        size_divisor: at least 1, such as the number of shards.

    Returns:
        The padded batch, as views if nothing is added, and the number of added rows; pass it to ``unpad_dataproto``.

    Raises:
        DataError: if ``size_divisor`` is less than 1.
    """
    if size_divisor < 1:
        raise DataError(f"size_divisor is {size_divisor}: expected at least 1", size_divisor=size_divisor)
    pad_size = -len(data) % size_divisor
    padded = data.select_idxs(np.arange(len(data) + pad_size) % len(data)) if pad_size else data.slice()
    return padded, pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Remove the last ``pad_size`` rows; same as ``data.unpad(pad_size)``."""
    return data.unpad(pad_size)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Reshape ``[batch, ...]`` to ``[new_batch_size, batch // new_batch_size, ...]``; see ``DataProto``."""
    return data.fold_batch_dim(new_batch_size)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Reshape ``[a, b, ...]`` to ``[a * b, ...]``, the inverse of folding; see ``DataProto``."""
    return data.unfold_batch_dim(batch_dims)


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Stack rows into a batch, as a DataLoader's ``collate_fn`` does.

    Args:
        x: at least one row, as indexing a `DataProto` with an int returns it.

    Returns:
        A copy of the rows, with the ``meta_info`` of the first.

    Raises:
        DataError: if there are no rows, or rows differ in dtype or shape of a column; names the column and the row.
    """
    if not x:
        raise DataError("collate_fn got no rows: expected at least one DataProtoItem")
    batch = stack_rows([item.batch for item in x])
    arrays = {key: as_array([item.non_tensor_batch[key] for item in x]) for key in x[0].non_tensor_batch}
    return DataProto(batch, arrays, copy_meta(x[0].meta_info))
