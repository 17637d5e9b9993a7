"""``doctor`` on a cluster of two raylets of this machine; the second one starts with wrong variables."""

from __future__ import annotations

import sys

import ray
from ray.cluster_utils import Cluster

from mcontroller.cli.main import main

ADDRESS = "127.0.0.9"


def run() -> int:
    small = {"object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **small})
    wrong = {"NCCL_SOCKET_IFNAME": "ib7"}
    cluster.add_node(num_cpus=1, num_gpus=2, node_ip_address=ADDRESS, env_vars=wrong, **small)
    ray.init(address=cluster.address, log_to_driver=False)
    status = main(["doctor", *sys.argv[1:]])
    ray.shutdown()
    cluster.shutdown()
    return status


if __name__ == "__main__":
    sys.exit(run())
