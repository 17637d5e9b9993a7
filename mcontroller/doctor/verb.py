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
import statistics
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from mcontroller.doctor.checks import (
    Finding,
    Verdict,
    check_addresses,
    check_clock,
    check_connection,
    check_gpucheck,
    check_node,
    check_shared_directory,
    check_versions,
    connections_to_try,
    exit_status,
    table,
)
from mcontroller.doctor.facts import NodeFacts
from mcontroller.doctor.nodes import Node, ask_all, local_node, ray_nodes
from mcontroller.errors import ResourceError

UNREACHABLE = 2
"""Exit status if the cluster of ``--address`` cannot be reached."""

_ANSWER_TIMEOUT_S = 300.0
_CONNECT_TIMEOUT_S = 5.0
_GPUCHECK_TIMEOUT_S = 280.0


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
    findings = _of_cluster(arguments) if connected else _examined([local_node()], arguments)
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


def examine(nodes: Sequence[Node], *, checkpoints: str | None, ranks: int | None, gpucheck: bool) -> Iterator[Finding]:
    """Yield the findings of all nodes; a node that does not answer is one of them, and is left out of the others.

    Args:
        nodes: the nodes of the cluster, or this machine.
        checkpoints: the directory of checkpoints; None to leave it out.
        ranks: ranks of a run on each node; None for one for each GPU.
        gpucheck: whether to run the smallest part of gpucheck on nodes with GPUs.
    """
    answering: list[Node] = []
    facts: list[NodeFacts] = []
    for node, answer in ask_all(nodes, "facts", checkpoints):
        if isinstance(answer, ResourceError):
            advice = "look at the raylet's log on the node; the node needs mcontroller on its PYTHONPATH"
            yield Finding("agent", node.address, Verdict.FAILURE, answer.message, advice)
        else:
            answering.append(node)
            facts.append(answer)
            yield from check_node(answer, ranks)
    if len(answering) > 1:
        yield from check_versions(facts)
        yield from check_addresses(facts)
        yield from _connections(answering)
        yield from _clocks(answering)
        if checkpoints is not None:
            yield _shared(answering, checkpoints)
    if gpucheck:
        with_gpus = [node for node, each in zip(answering, facts, strict=True) if each.driver_gpus or each.torch_gpus]
        for node, answer in ask_all(with_gpus, "gpucheck", _GPUCHECK_TIMEOUT_S):
            status, output = (1, answer.message) if isinstance(answer, ResourceError) else answer
            yield check_gpucheck(node.address, status, output)


def _connections(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Connect the nodes with each other, each to all addresses of the other."""
    listening = [answer for _, answer in ask_all(nodes, "listen")]
    for source, target in connections_to_try(len(nodes)):
        if isinstance(listening[target], ResourceError):
            yield check_connection(nodes[source].address, nodes[target].address, 0, listening[target].message)
            continue
        addresses, port = listening[target]
        for address in addresses:
            try:
                error = nodes[source].ask("connect", address, port, _CONNECT_TIMEOUT_S)
            except ResourceError as raised:
                error = raised.message
            yield check_connection(nodes[source].address, address, port, error)


def _clocks(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Compare the clock of every node with this one: the answer that came fastest, of five."""
    for node in nodes:
        measured = []
        for _ in range(5):
            before = time.time()
            there = node.ask("now")
            after = time.time()
            measured.append(((after - before) / 2, there - statistics.fmean((before, after))))
        uncertainty, skew = min(measured)
        yield check_clock(node.address, skew, uncertainty)


def _shared(nodes: Sequence[Node], checkpoints: str) -> Finding:
    """Write a file in the directory of checkpoints on one node, and look for it on all."""
    path = str(Path(checkpoints) / f".doctor-{uuid.uuid4().hex}")
    try:
        nodes[0].ask("write", path)
    except ResourceError as error:
        return Finding("shared checkpoints", nodes[0].address, Verdict.FAILURE, error.message, "make it writable")
    seen = {node.address: bool(node.ask("sees", path)) for node in nodes}
    nodes[0].ask("remove", path)
    return check_shared_directory(checkpoints, seen)
