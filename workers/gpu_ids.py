"""The unique ids of nodes and GPUs, which are the same in all processes, and a check with them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mcontroller.errors import ResourceError
from mcontroller.machine import machine_id


def node_id() -> str:
    """Return the id of this node: Ray's, or the machine's in a process without Ray."""
    ray = sys.modules.get("ray")
    return machine_id() if ray is None or not ray.is_initialized() else ray.get_runtime_context().get_node_id()


def node_address() -> str:
    """Return the address of this node for other nodes; that of the loopback in a process without Ray."""
    ray = sys.modules.get("ray")
    return "127.0.0.1" if ray is None or not ray.is_initialized() else ray.util.get_node_ip_address()


def gpu_id(device: torch.device | int) -> str:
    """Return the UUID of a GPU that this process can use."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_gpus() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process can use, by index; none without CUDA."""
    return tuple(map(gpu_id, range(torch.cuda.device_count()))) if torch.cuda.is_available() else ()


def check_distinct_gpus(device: torch.device) -> None:
    """Raise ResourceError on every rank if two ranks of the default group are on one GPU.

    A process with a ``NCCL_HOSTID`` of its own is on another node for NCCL, which then takes two ranks on one GPU.

    Ranks exchange the ids of their GPUs through the store of the rendezvous: no collective is needed, which NCCL would
    reject with "Duplicate GPU detected", or never finish.

    Args:
        device: the GPU of this rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = c10d._get_default_store()
    keys = [f"mcontroller/gpu/{number}" for number in range(world_size)]
    store.set(keys[rank], f"{os.environ.get('NCCL_HOSTID') or socket.gethostname()} {gpu_id(device)}")
    check_distinct([value.decode() for value in store.multi_get(keys)])


def check_distinct(gpus: Sequence[str]) -> None:
    """Raise ResourceError if a GPU occurs twice.

    Args:
        gpus: by rank, the name of its node and the UUID of its GPU, with a space between them.
    """
    ranks: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks.setdefault(gpu, []).append(rank)
    for gpu, sharing in ranks.items():
        if len(sharing) > 1:
            node, _, uuid = gpu.partition(" ")
            raise ResourceError(
                f"ranks {', '.join(map(str, sharing))} of the group are on one GPU, {uuid} of node {node}, and NCCL "
                "needs a GPU for each rank of a communicator: start the group in a pool with as many GPUs as ranks; "
                "different groups can share a GPU (max_colocate_count)",
                ranks=sharing,
                node=node,
                gpu=uuid,
            )
