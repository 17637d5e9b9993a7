"""Check all nodes of the Ray cluster, or this machine: versions, GPUs, network, memory, limits, clocks, paths.

Run this before a run on a new cluster, and gpucheck on a node of every kind. It looks for a running cluster (--address,
RAY_ADDRESS, or the local one), and checks this machine only if there is none. Every line has a verdict, and what to do
about it. The exit status is 0 without failures, 1 with one, and 2 if the cluster of --address cannot be reached.

examples: mcontroller doctor
          mcontroller doctor --address 10.0.0.1:6379 --checkpoints /shared/checkpoints --json doctor.json
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcontroller.doctor.checks import (
    FAILURE,
    OK,
    Finding,
    check_clock,
    check_node,
    check_shared_directory,
    check_versions,
    exit_status,
    table,
)
from mcontroller.doctor.node import NodeAgent, NodeFacts

UNREACHABLE = 2
"""Exit status if the cluster of ``--address`` cannot be reached."""
Ask = Callable[..., Any]
"""Calls a method of the agent on a node: by its name, with its arguments."""
_ALL_PAIRS = 8
_ANSWER_TIMEOUT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("--address", help="address of a Ray cluster; default: RAY_ADDRESS, or the one on this machine")
    parser.add_argument("--local", action="store_true", help="check this machine only")
    parser.add_argument("--checkpoints", metavar="PATH", help="directory of checkpoints, which all nodes must share")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="ranks on a node; default: its GPUs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to a file")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the table and return the exit status."""
    try:
        connected = not arguments.local and _connect(arguments.address)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        where = arguments.address or f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}"
        sys.stderr.write(f"doctor: no Ray cluster answers at {where}: {reason}\n")
        return UNREACHABLE
    nodes = _ray_nodes() if connected else _this_machine()
    findings = list(_findings(nodes, arguments))
    head = "the Ray cluster" if connected else "this machine; it runs no Ray cluster, so nodes are not compared"
    sys.stdout.write(f"{head}\n{table(findings)}\n")
    if arguments.json is not None:
        content = {"status": exit_status(findings), "findings": [asdict(finding) for finding in findings]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return exit_status(findings)


def _connect(address: str | None) -> bool:
    """Connect to a cluster that runs, and return whether there is one; a given address must be reachable."""
    if importlib.util.find_spec("ray") is None:
        return False
    import ray

    if ray.is_initialized():
        return True
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        if address is not None or "RAY_ADDRESS" in os.environ:
            raise
        return False
    return True


def _this_machine() -> dict[str, Ask]:
    agent = NodeAgent(socket.gethostname())
    return {agent.address: lambda method, *arguments: getattr(agent, method)(*arguments)}


def _ray_nodes() -> dict[str, Ask]:
    """Start an agent on every live node, and return by address what calls it.

    Agents ask for no resources, so that they run on a cluster that is in use.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}})(NodeAgent)

    def started(node: dict[str, Any]) -> Ask:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        agent = remote.options(scheduling_strategy=strategy).remote(node["NodeManagerAddress"], node["Resources"])
        return lambda method, *arguments: ray.get(getattr(agent, method).remote(*arguments), timeout=_ANSWER_TIMEOUT_S)

    return {node["NodeManagerAddress"]: started(node) for node in ray.nodes() if node["Alive"]}


def _findings(nodes: dict[str, Ask], arguments: argparse.Namespace) -> Iterator[Finding]:
    """Yield the findings of all nodes; a node that does not answer is one of them, and is left out of the others."""
    facts: dict[str, NodeFacts] = {}
    for address, ask in nodes.items():
        try:
            facts[address] = ask("facts", arguments.checkpoints)
            yield from check_node(facts[address], arguments.ranks_per_node)
        except Exception as error:  # of Ray, which has many
            advice = "look at the raylet's log on the node; the node needs mcontroller on its PYTHONPATH"
            yield Finding("agent", address, FAILURE, str(error).strip().rpartition("\n")[2], advice)
    nodes = {address: nodes[address] for address in facts}
    if len(nodes) > 1:
        yield from check_versions(list(facts.values()))
        yield from _connections(nodes)
        for address, ask in nodes.items():
            before, there, after = time.time(), ask("now"), time.time()
            yield check_clock(address, there - (before + after) / 2, (after - before) / 2)
        if arguments.checkpoints is not None:
            yield _shared(nodes, arguments.checkpoints)


def _connections(nodes: dict[str, Ask]) -> Iterator[Finding]:
    """Connect all pairs of up to eight nodes, or neighbors on a ring of more, on ephemeral ports as NCCL's are."""
    ports = {address: ask("listen") for address, ask in nodes.items()}
    pairs = list(itertools.permutations(nodes, 2))
    if len(nodes) > _ALL_PAIRS:
        pairs = list(itertools.pairwise([*nodes, next(iter(nodes))]))
    for source, target in pairs:
        error = nodes[source]("connect", target, ports[target])
        if error is None:
            yield Finding("ports", source, OK, f"reaches {target}")
            continue
        advice = (
            "allow TCP between the nodes on all ports (NCCL and gloo listen on ephemeral ones), or name an interface "
            f"with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; test: nc -vz {target} {ports[target]}"
        )
        yield Finding("ports", source, FAILURE, f"cannot reach {target}:{ports[target]}: {error}", advice)


def _shared(nodes: dict[str, Ask], checkpoints: str) -> Finding:
    """Write a file in the directory of checkpoints on one node, and look for it on all."""
    path = str(Path(checkpoints) / f".doctor-{uuid.uuid4().hex}")
    first = next(iter(nodes.values()))
    try:
        first("write", path)
        return check_shared_directory(checkpoints, {address: ask("has", path) for address, ask in nodes.items()})
    except Exception as error:  # an OSError of the node, in an error of Ray
        reason = str(error).strip().rpartition("\n")[2]
        return Finding("shared checkpoints", "all", FAILURE, reason, "make the directory writable")
    finally:
        first("remove", path)
