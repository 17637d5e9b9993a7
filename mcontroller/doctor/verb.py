"""Check all nodes of the Ray cluster, or this machine: versions, GPUs, network, memory, limits, clocks, paths.

Run this before a run on a new cluster. It looks for a running cluster (--address, RAY_ADDRESS, or the local one), and
checks this machine only if there is none. Every line has a verdict, and what to do about it. The exit status is 0
without failures, 1 with one, and 2 if the cluster of --address cannot be reached. docs/gpu.md explains the checks.

examples: mcontroller doctor
          mcontroller doctor --address 10.0.0.1:6379 --checkpoints /shared/checkpoints --json doctor.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mcontroller.doctor.examine import examine
from mcontroller.doctor.findings import Finding, exit_status, table
from mcontroller.doctor.nodes import LocalNode, Node, ray_nodes

__all__ = ["UNREACHABLE", "add_arguments", "run"]

UNREACHABLE = 2
"""Exit status if the cluster of ``--address`` cannot be reached."""

_ANSWER_TIMEOUT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("--address", help="address of a Ray cluster; default: RAY_ADDRESS, or the one on this machine")
    parser.add_argument("--local", action="store_true", help="check this machine only")
    parser.add_argument("--checkpoints", metavar="PATH", help="directory of checkpoints, which all nodes must share")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="ranks on a node; default: its GPUs")
    parser.add_argument("--no-gpucheck", action="store_true", help="leave out gpucheck on nodes with GPUs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to a file")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the table and return the exit status."""
    connected = False
    if not arguments.local:
        try:
            connected = _connect(arguments.address)
        except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            place = arguments.address or f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}"
            sys.stderr.write(f"doctor: no Ray cluster answers at {place}: {reason}\n")
            return UNREACHABLE
    findings = _of_cluster(arguments) if connected else _examined([LocalNode()], arguments)
    head = "the Ray cluster" if connected else "this machine; no Ray cluster runs here, so nodes are not compared"
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


def _of_cluster(arguments: argparse.Namespace) -> list[Finding]:
    nodes = ray_nodes(_ANSWER_TIMEOUT_S)
    try:
        return _examined(nodes, arguments)
    finally:
        for node in nodes:
            node.end()


def _examined(nodes: Sequence[Node], arguments: argparse.Namespace) -> list[Finding]:
    return list(
        examine(
            nodes,
            checkpoints=arguments.checkpoints,
            ranks=arguments.ranks_per_node,
            gpucheck=not arguments.no_gpucheck,
        )
    )
