"""What a configuration asks of a cluster, next to what the cluster has; without starting anything."""

from __future__ import annotations

import os

import psutil
import ray
import torch

from mcontroller.locality import locality
from parallel_state.topology import Topology
from workers.run.config import MAIN_POOL, RunConfig
from workers.run.parts import roles_of
from workers.run.pools import pool_nodes, pools_of, role_layouts

__all__ = ["locality_lines", "resource_lines"]

_GB = 2**30


def locality_lines(config: RunConfig) -> list[str]:
    """Return a line for each axis of a role that crosses nodes of its pool, and one if none does."""
    lines = []
    for placed in role_layouts(config):
        nodes = [f"node{node}" for node, size in enumerate(placed.nodes) for _ in range(size)]
        topology = Topology.from_layout(placed.parallel.layout(len(nodes)), nodes=nodes)
        lines += [f"{placed.key}: {line}" for line in locality(topology).lines()]
    counts = ", ".join(f"{len(nodes)} in the {_named(name)}" for name, nodes in pool_nodes(config).items())
    return lines or [f"locality: no axis of a role crosses nodes ({counts})"]


def resource_lines(config: RunConfig) -> list[str]:
    """Return the resources that the pools reserve and those of the cluster, or of this machine if there is none."""
    unit = "GPU" if config.pool.use_gpu else "CPU"
    pools = pools_of(config, roles_of(config))
    lines = [
        f"{_named(name)}: {sum(nodes)} bundles of 1 {unit} on {len(nodes)} nodes, "
        f"{sum(nodes) * pools.slots_of(name)} slots for processes"
        for name, nodes in pool_nodes(config).items()
    ]
    needed = {"CPU": pools.get_n_slots(), "GPU": pools.get_n_gpus() if config.pool.use_gpu else 0}
    if config.cluster.address is None:
        memory = psutil.virtual_memory().total / _GB
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        cpus = len(os.sched_getaffinity(0))
        lines.append(f"this machine, on which the run starts Ray: {cpus} CPUs, {gpus} GPUs, {memory:.1f} GB of memory")
        total: dict[str, float] = {"CPU": needed["CPU"], "GPU": gpus}  # Ray is started with the CPUs that are needed
    else:
        ray.init(address=config.cluster.address, log_to_driver=False)
        total = ray.cluster_resources()
        ray.shutdown()
        found = f"cluster {config.cluster.address}: {total.get('CPU', 0):g} CPUs, {total.get('GPU', 0):g} GPUs, "
        lines.append(found + f"{total.get('memory', 0) / _GB:.1f} GB of memory")
    keys = ", ".join(["pool.process_on_nodes", *(f"pools.{name}.process_on_nodes" for name in config.pools)])
    what = "pools need" if config.pools else "pool needs"
    lacks = [resource for resource in needed if total.get(resource, 0) < needed[resource]]
    return lines + [f"the {what} {needed[resource]} {resource}s: reduce {keys}" for resource in lacks]


def _named(pool: str) -> str:
    return "pool" if pool == MAIN_POOL else f"pool {pool}"
