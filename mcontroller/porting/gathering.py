"""The rows of a batch on every rank of a process group, as ported workers gather them."""

from __future__ import annotations

from typing import Any

import torch

from mcontroller.data.protocol import DataProto

__all__ = ["all_gather_data_proto"]


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replace the rows of a batch by those of all ranks of a group, in place and in the order of the ranks.

    The rows travel pickled, over the device that the group's backend needs; the tensors end where they were.

    Args:
        data: The batch, with the same columns on every rank. Its ``meta_info`` stays as it is.
        process_group: Group of torch.distributed; None for all ranks.
    """
    stored = data.stored_batch
    devices = {} if stored is None else {key: value.device for key, value in stored.items()}
    parts: list[Any] = [None] * torch.distributed.get_world_size(process_group)
    rows = data.select(meta_info_keys=[]).to("cpu")
    torch.distributed.all_gather_object(parts, rows, group=process_group)
    gathered = DataProto.concat(parts)
    if len(set(devices.values())) == 1:
        gathered.to(next(iter(devices.values())))
    data.stored_batch, data.non_tensor_batch = gathered.stored_batch, gathered.non_tensor_batch
