"""What a configuration asks of a cluster, next to what the cluster has; without starting anything."""

from __future__ import annotations

import os

import psutil
import ray
import torch

from mcontroller.locality import locality
from parallel_state.topology import Topology
from workers.run.config import RunConfig
from workers.run.parts import role_layouts

__all__ = ["locality_lines", "resource_lines"]

_GB = 2**30


def locality_lines(config: RunConfig) -> list[str]:
    """Return a line for each axis of a role that crosses nodes, and one if none does."""
    sizes = config.pool.process_on_nodes
    nodes = [f"node{node}" for node, size in enumerate(sizes) for _ in range(size)]
    lines = []
    for role, parallel in role_layouts(config):
        topology = Topology.from_layout(parallel.layout(len(nodes)), nodes=nodes)
        lines += [f"{role}: {line}" for line in locality(topology).lines()]
    return lines or [f"locality: no axis of a role crosses nodes ({len(sizes)} in the pool)"]


def resource_lines(config: RunConfig) -> list[str]:
    """Return the resources that the pool reserves and those of the cluster, or of this machine if there is none."""
    pool = config.pool
    bundles, unit = sum(pool.process_on_nodes), "GPU" if pool.use_gpu else "CPU"
    slots = bundles * pool.max_colocate_count
    asked = f"pool: {bundles} bundles of 1 {unit} on {len(pool.process_on_nodes)} nodes, {slots} slots for processes"
    if config.cluster.address is None:
        memory = psutil.virtual_memory().total / _GB
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        cpus = len(os.sched_getaffinity(0))
        found = f"this machine, on which the run starts Ray: {cpus} CPUs, {gpus} GPUs, {memory:.1f} GB of memory"
        lacks = pool.use_gpu and gpus < bundles
    else:
        ray.init(address=config.cluster.address, log_to_driver=False)
        total = ray.cluster_resources()
        ray.shutdown()
        found = f"cluster {config.cluster.address}: {total.get('CPU', 0):g} CPUs, {total.get('GPU', 0):g} GPUs, "
        found += f"{total.get('memory', 0) / _GB:.1f} GB of memory"
        lacks = total.get(unit, 0) < bundles
    return [asked, found, *([f"the pool needs {bundles} {unit}s: reduce pool.process_on_nodes"] if lacks else [])]
