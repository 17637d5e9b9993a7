"""Wait until all nodes have joined a Ray cluster, or name the nodes that it has lost.

Status: tried by hand on one machine.

python launch/ray_nodes.py wait --timeout=300 node1 node2    exit status 1 and the missing nodes if they do not join
python launch/ray_nodes.py lost node1 node2                  exit status 1 and the lost nodes if some are lost

The cluster is that of RAY_ADDRESS. The names are those of ``ray start --node-name``.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("wait", "lost"))
    parser.add_argument("names", nargs="+", metavar="NODE")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait; default: 300")
    options = parser.parse_args(arguments)
    waits = options.what == "wait"
    deadline = time.monotonic() + (options.timeout if waits else 5.0)
    if not head_accepts(deadline):
        head = f"node {options.names[0]} (no Ray head at {os.environ['RAY_ADDRESS']})"
        if waits:
            print(f"ray_nodes.py: {head} within {options.timeout:g} s; see ray-{options.names[0]}.log", file=sys.stderr)
        else:
            print(head)
        return 1
    ray.init(logging_level="ERROR", log_to_driver=False)
    return wait(options.names, deadline) if waits else lost(options.names)


def head_accepts(deadline: float) -> bool:
    """Wait until the head accepts connections; ``ray.init`` alone would retry for minutes. Return False if too late."""
    host, _, port = os.environ["RAY_ADDRESS"].rpartition(":")
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return True
        except OSError:
            time.sleep(0.5)
    return False


def wait(names: Sequence[str], deadline: float) -> int:
    """Wait until all nodes are alive, and print their addresses and resources; return 1 after the deadline."""
    while missing := missing_nodes(names, ray.nodes()):
        if time.monotonic() > deadline:
            found = f"{len(names) - len(missing)} of {len(names)} nodes joined in time"
            print(f"ray_nodes.py: {found}; missing: {', '.join(missing)}", file=sys.stderr)
            return 1
        time.sleep(0.5)
    for node in sorted(ray.nodes(), key=lambda node: str(node["NodeName"])):
        has = node["Resources"]
        amounts = f"{has.get('CPU', 0):g} CPUs, {has.get('GPU', 0):g} GPUs"
        print(f"ray_nodes.py: node {node['NodeName']} at {node['NodeManagerAddress']}: {amounts}", flush=True)
    return 0


def lost(names: Sequence[str]) -> int:
    """Print the nodes that are not alive, with their addresses; return 1 if there are any.

    Ray's head notices seconds after the driver that a node is gone, so each raylet is asked for a connection too.
    """
    nodes = ray.nodes()
    addresses = {node["NodeName"]: node["NodeManagerAddress"] for node in nodes}
    with ThreadPoolExecutor(max_workers=64) as threads:
        reachable = threads.map(accepts, nodes)
        missing = missing_nodes(names, [node for node, answers in zip(nodes, reachable, strict=True) if answers])
    if missing:
        print(", ".join(f"node {name} ({addresses.get(name, 'never joined')})" for name in missing))
    return 1 if missing else 0


def accepts(node: dict[str, Any]) -> bool:
    """Return whether the raylet of a node accepts connections."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=5).close()
    except OSError:
        return False
    return True


def missing_nodes(names: Sequence[str], nodes: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of which no node is alive."""
    alive = {node["NodeName"] for node in nodes if node["Alive"]}
    return [name for name in names if name not in alive]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
