"""A driver on a cluster of three nodes on this machine, each with its own address; writes what it saw as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

from mcontroller import DataProto, Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register
from mcontroller.errors import CallTimeout, ResourceError, WorkerDied
from mcontroller.ray.calls import supervision

NODES = ("127.0.0.10", "127.0.0.9")
"""In the order in which they join; as text, and as they joined, the tenth would come first."""

GPUS = {NODES[0]: "GPU-71,GPU-70", NODES[1]: "MIG-81,MIG-80"}
"""CUDA_VISIBLE_DEVICES of each node. Ray counts these GPUs, and torch can use none of them."""

CPUS = 3
"""CPUs of each node: two parts of a pool that need more together are on two nodes."""


OF_THE_DEVICE = ("CUDA_VISIBLE_DEVICES", "RAY_LOCAL_RANK", "RAY_LOCAL_WORLD_SIZE")


class Resident(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> dict[str, Any]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", *OF_THE_DEVICE)
        return {"node": ray.util.get_node_ip_address(), **{name: os.environ[name] for name in names}}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self) -> int:
        torch.distributed.init_process_group("gloo")
        total = torch.tensor(self.rank)
        torch.distributed.all_reduce(total)
        return int(total)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def same(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def same_later(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            os.write(1, b"the last words of a rank\n")
            os._exit(7)
        threading.Event().wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_on(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        torch.distributed.all_reduce(torch.zeros(2))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def wait(self) -> None:
        threading.Event().wait()


def group(processes: list[int], name: str) -> tuple[RayResourcePool, Any]:
    pool = RayResourcePool(processes, use_gpu=False, name_prefix=name)
    return pool, RayWorkerGroup(pool, RayClassWithInitArgs(Resident), name_prefix=name)


def died(call: Any) -> dict[str, Any]:
    began = time.monotonic()
    try:
        call()
    except WorkerDied as error:
        return {**error.fields, "seconds": time.monotonic() - began}
    return {}


def timeout_of_stopped(residents: Any, rank: int) -> dict[str, Any]:
    residents.meet()
    process = residents.process_id()[rank]
    supervision.QUERY_SECONDS = 1.0  # it never answers
    try:
        residents.stop_on.options(timeout=1)(rank)
    except CallTimeout as error:
        return {"cause": error.cause, "report": error.report}
    finally:
        with contextlib.suppress(ProcessLookupError):  # Ray has ended it with its group
            os.kill(process, signal.SIGKILL)
    return {}


def main() -> None:
    small = {"object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    nodes = [
        cluster.add_node(
            num_cpus=CPUS,
            num_gpus=2,
            env_vars={"CUDA_VISIBLE_DEVICES": GPUS[address]},
            node_ip_address=address,
            **small,
        )
        for address in NODES
    ]
    ray.init(address=cluster.address, log_to_driver=False)
    batch = DataProto.from_dict({"ids": torch.arange(600_000).view(6, -1)})
    results: dict[str, Any] = {}
    pool, residents = group([3, 1], "residents")
    results["where"], results["total"] = residents.where(), residents.meet()
    results["same"] = residents.same(residents.same_later(batch)) == batch
    results["death"] = died(lambda: residents.die_on(3))
    pool.shutdown()
    try:
        group([4], "too_large")
    except ResourceError as error:
        results["rejected"] = str(error)
    for isolated in (False, True):
        with RayResourcePool([2, 2], isolate_gpus=isolated).reserve() as pool:
            residents = RayWorkerGroup(pool, RayClassWithInitArgs(Resident), name_prefix="residents")
            results[f"gpus, isolated={isolated}"] = residents.where()
            results["table"] = pool.describe()
            if isolated:
                results["stopped"] = timeout_of_stopped(residents, rank=3)
    pool = RayResourcePool([1, 1], use_gpu=False, name_prefix="pair", spare_bundles=1)
    pair: Any = RayWorkerGroup(pool, RayClassWithInitArgs(Resident), name_prefix="pair")
    waiting = pair.wait()
    cluster.remove_node(nodes[0], allow_graceful=False)
    began = time.monotonic()
    while pair.broken is None and time.monotonic() - began < 60:
        time.sleep(0.01)
    results["node_death"] = {**died(waiting.get), "seconds": time.monotonic() - began}
    pair.restart()
    results["replaced"] = {"where": pair.where(), "total": pair.meet(), "seconds": time.monotonic() - began}
    try:
        pool.replace_lost([node["NodeID"] for node in ray.nodes()])
    except ResourceError as error:
        results["no_spares"] = str(error)
    pair.shutdown()
    pool.shutdown()
    sys.stdout.write(json.dumps(results) + "\n")
    sys.stdout.flush()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
