"""The device that a rank computes on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mcontroller.errors import ResourceError

if TYPE_CHECKING:
    import torch

__all__ = ["device_of_rank"]


def device_of_rank(local_rank: int, local_world_size: int) -> torch.device:
    """Return the GPU of a rank among those that its process can see, or the CPU if torch can use none.

    A cluster may count GPUs that torch cannot use. Then a rank of a GPU pool computes on the CPU too.

    Args:
        local_rank: the rank's index among the ranks of its group on its node; also the index of its GPU.
        local_world_size: number of ranks of its group on its node.

    Raises:
        ResourceError: there are more ranks than GPUs. Two ranks would share one, which NCCL rejects.
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
            f" let every process see {needed} GPUs, put at most {visible} ranks on a node, or use a pool with "
            "use_gpu=False",
            local_rank=local_rank,
            local_world_size=local_world_size,
            visible=visible,
        )
    return torch.device("cuda", local_rank)
