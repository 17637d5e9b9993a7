"""The helper functions that come with DataProto, by the names its users know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mcontroller.data import columns, meta
from mcontroller.data.tensordicts import is_tensordict
from mcontroller.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from mcontroller.data.protocol import DataProto


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """The batch with rows from its start repeated at its end until ``size_divisor`` divides it, and how many."""
    if size_divisor < 1:
        raise DataError(f"size_divisor {size_divisor}: give at least 1", size_divisor=size_divisor)
    pad_size = -len(data) % size_divisor
    padded = data.select_idxs(np.arange(len(data) + pad_size) % len(data)) if pad_size else data.slice()
    return padded, pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The batch without its last ``pad_size`` rows, as views."""
    return data.unpad(pad_size)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """``[batch, ...]`` as ``[new_batch_size, batch // new_batch_size, ...]``, as views."""
    return data.fold_batch_dim(new_batch_size)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """``[a, b, ...]`` as ``[a * b, ...]``, over the first ``batch_dims`` dims."""
    return data.unfold_batch_dim(batch_dims)


def union_tensor_dict(tensor_dict1: TensorDict | None, tensor_dict2: TensorDict | None) -> TensorDict | None:
    """The columns of both; a column in both must be equal, or DataError names it."""
    united = unite(tensor_dict1, tensor_dict2)
    return united if united is None or is_tensordict(united) else united.tensordict()


def unite(left: columns.Batch | None, right: columns.Batch | None) -> columns.Batch | None:
    """The columns of both, on the device of the first where it has one; DataError names one that differs."""
    if left is None or right is None:
        return columns.shallow(right if left is None else left)
    if tuple(left.batch_size) != tuple(right.batch_size):
        sizes = (list(left.batch_size), list(right.batch_size))
        raise DataError(f"union of batch dims {sizes[0]} and {sizes[1]}: give equal ones", batch_sizes=sizes)
    united = dict(left.items())
    for key, value in right.items():
        if key in united and not columns.same(united[key], value):
            raise _differs(key, columns.describe(united[key]), columns.describe(value))
        united.setdefault(key, value if left.device is None else value.to(left.device))
    return columns.like(left, united, left.batch_size[0])


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns of both; a column in both must be equal, or DataError names it."""
    united = dict(tensor_dict1)
    for key, value in tensor_dict2.items():
        if key in united and not meta.same_array(united[key], value):
            raise _differs(key, columns.describe(united[key]), columns.describe(value))
        united.setdefault(key, value)
    return united


def _differs(key: str, first: str, second: str) -> DataError:
    return DataError(
        f"union: column {key!r} is in both and differs ({first} and {second}); pop or rename one of them",
        column=key,
    )
