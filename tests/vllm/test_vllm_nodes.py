"""One engine of vLLM on two nodes: two addresses of this machine, each with a raylet of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest
import ray
from ray.cluster_utils import Cluster

from mcontroller import MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from tests.vllm.policies import Actor, actor_config, prompts
from tests.vllm.test_vllm_rollout import GREEDY, TOLERANCE, update, worst_difference

NODES = ("127.0.0.9", "127.0.0.10")


@pytest.mark.processes
def test_an_engine_on_two_nodes_has_the_policys_log_probs_after_updates() -> None:
    directory = tempfile.mkdtemp(prefix="nodes")  # a short name: Ray puts its sockets there
    environment = {**os.environ, "RAY_TMPDIR": directory}
    environment.pop("RAY_ADDRESS", None)
    program = [sys.executable, "-m", "tests.vllm.test_vllm_nodes"]
    run = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, timeout=500, check=True)
    [line] = [line for line in run.stdout.splitlines() if line.startswith("{")]  # Ray prints after it
    shutil.rmtree(directory, ignore_errors=True)
    results = json.loads(line)
    assert results["callers"] == 1 and results["differences"][1] > 100 * TOLERANCE
    assert max(results["differences"][0], results["differences"][2]) < TOLERANCE


def main() -> None:
    small = {"object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    for address in NODES:
        cluster.add_node(num_cpus=1, node_ip_address=address, **small)
    ray.init(address=cluster.address, log_to_driver=False)
    # Two data-parallel shards of one rank, and an engine of both.
    engine = {"verify_weights": "fingerprints", "vllm": {"tp": 2}}
    config = actor_config("dense-tp2", parallel={"tp": 1}, rollout=engine)
    created = RayClassWithInitArgs(Actor, config, role="actor_rollout")
    with (
        RayResourcePool([1, 1], use_gpu=False, name_prefix="nodes", max_colocate_count=1) as pool,
        MegatronRayWorkerGroup(pool, created, name_prefix="nodes") as group,
    ):
        group.init_model()
        stale = group.generate_sequences(prompts(**GREEDY))
        differences = [worst_difference(group, stale)]
        update(group, stale)
        differences.append(worst_difference(group, stale))
        differences.append(worst_difference(group, group.generate_sequences(prompts(**GREEDY))))
        callers = sum(pid is not None for pid in group.engine_pid())
    sys.stdout.write(json.dumps({"differences": differences, "callers": callers}) + "\n")
    sys.stdout.flush()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
