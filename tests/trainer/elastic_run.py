"""A run of toy roles on two nodes, of which one is lost and comes back; writes what it saw as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from mcontroller import RayWorkerGroup
from mcontroller.ray import ResourcePoolManager
from tests.trainer.test_elastic import ROLES
from tests.trainer.toy import toy_config, toy_trainer
from trainer import Callback
from trainer.saving.recovery import FAILURES

ADDRESSES = ("127.0.0.21", "127.0.0.22")
SMALL = {"num_cpus": 2, "object_store_memory": 100_000_000}


class Loss(Callback):
    """Ends a node after the second step, and starts one in its place after the next step."""

    def __init__(self, cluster: Cluster, nodes: list[Any]) -> None:
        self.cluster, self.nodes, self.steps = cluster, nodes, list[list[Any]]()

    def step_ended(self, trainer: Any, metrics: dict[str, float]) -> None:
        actor = trainer.actor
        self.steps.append([trainer.global_steps, sorted(set(actor.executor.nodes)), metrics["train/prompts"]])
        if trainer.global_steps == 2 and self.nodes:
            self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)
        elif actor.world_size == 1:
            self.cluster.add_node(node_ip_address=ADDRESSES[1], **SMALL)


def main(directory: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(node_ip_address=address, **SMALL) for address in ADDRESSES]
    ray.init(address=cluster.address, log_to_driver=False)
    config = toy_config(5, default_local_dir=directory, elastic=True, memory_save_freq=1, test_freq=-1)
    pools = ResourcePoolManager({"pool": [1, 1]}, dict.fromkeys(ROLES, "pool"), use_gpu=False)
    loss = Loss(cluster, nodes[1:])
    options: dict[str, Any] = {"resource_pool_manager": pools, "ray_worker_group_cls": RayWorkerGroup}
    with toy_trainer(config, ROLES, callbacks=[loss], **options) as trainer:
        trainer.init_workers()
        trainer.fit()
    events = [json.loads(line) for line in (Path(directory) / FAILURES).read_text().splitlines()]
    recorded = {"steps": loss.steps, "events": [[event["kind"], event["message"]] for event in events]}
    sys.stdout.write(json.dumps(recorded) + "\n")
    sys.stdout.flush()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
