"""``doctor`` on a cluster of two raylets of this machine; the second one has a folder of packages of its own."""

from __future__ import annotations

import os
import sys

import ray
from ray.cluster_utils import Cluster

from mcontroller.cli.main import main

ADDRESS = "127.0.0.9"


def run(packages: str, *options: str) -> int:
    small = {"object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **small})
    path = os.pathsep.join([packages, os.environ.get("PYTHONPATH", "")])
    cluster.add_node(num_cpus=1, node_ip_address=ADDRESS, env_vars={"PYTHONPATH": path}, **small)
    ray.init(address=cluster.address, log_to_driver=False)
    status = main(["doctor", *options])
    ray.shutdown()
    cluster.shutdown()
    return status


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
