"""Unite the columns of two batches; a column of both must have the same values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mcontroller.data.column_info import describe_column, same_column
from mcontroller.data.columns import columns_like, shallow_copy
from mcontroller.data.meta import same_array
from mcontroller.data.tensordicts import is_tensordict
from mcontroller.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from mcontroller.data.columns import Batch

__all__ = ["union_columns", "union_numpy_dict", "union_tensor_dict"]


def union_tensor_dict(tensor_dict1: TensorDict | None, tensor_dict2: TensorDict | None) -> TensorDict | None:
    """Unite the columns of two TensorDicts, sharing their tensors.

    Args:
        tensor_dict1: The first TensorDict; its columns come first. None counts as one without columns.
        tensor_dict2: The second TensorDict, with the same batch dims.

    Raises:
        DataError: If the batch dims differ, or a column of both differs in dtype, shape or values.
    """
    united = union_columns(tensor_dict1, tensor_dict2)
    return united if united is None or is_tensordict(united) else united.tensordict()


def union_columns(left: Batch | None, right: Batch | None) -> Batch | None:
    """Unite the columns of two batches, on the device of the first if it has one.

    Raises:
        DataError: If the batch dims differ, or a column of both differs in dtype, shape or values.
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
        tensor_dict1: The first dict; its columns come first.
        tensor_dict2: The second dict.

    Raises:
        DataError: If a column of both differs in dtype, shape or values.
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
