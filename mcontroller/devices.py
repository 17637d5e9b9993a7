"""Which device a rank computes on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mcontroller.errors import ResourceError

if TYPE_CHECKING:
    import torch

__all__ = ["device_of_rank"]


def device_of_rank(local_rank: int, local_world_size: int) -> torch.device:
    """The GPU of a rank among those that its process can see; the CPU where torch can use none.

    A cluster may count GPUs that torch cannot use, so that a rank of a GPU pool may be on the CPU as well.

    Args:
        local_rank: the rank's index among those of its group on its node: the index of its GPU too.
        local_world_size: how many ranks its group has on its node.

    Raises:
        ResourceError: the ranks outnumber the GPUs, so that two would have the same, which NCCL rejects.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    needed, visible = max(local_world_size, local_rank + 1), torch.cuda.device_count()
    if needed > visible:
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ResourceError(
            f"the group has {needed} ranks on this node and needs a GPU for each, but the process of local rank "
            f"{local_rank} can see {visible} (CUDA_VISIBLE_DEVICES is {'not set' if listed is None else repr(listed)}):"
            f" let every process see {needed} GPUs, put at most {visible} ranks on a node, or take a pool with "
            "use_gpu=False",
            local_rank=local_rank,
            local_world_size=local_world_size,
            visible=visible,
        )
    return torch.device("cuda", local_rank)
