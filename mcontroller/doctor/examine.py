"""Ask the nodes, and judge their answers."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from mcontroller.doctor.cluster_checks import (
    check_addresses,
    check_clock,
    check_connection,
    check_gpucheck,
    check_shared_directory,
    check_versions,
    connections_to_try,
)
from mcontroller.doctor.facts import NodeFacts
from mcontroller.doctor.findings import Finding, Verdict
from mcontroller.doctor.node_checks import check_node
from mcontroller.doctor.nodes import Node, ask_all
from mcontroller.errors import ResourceError

__all__ = ["examine"]

_CONNECT_TIMEOUT_S = 5.0
_GPUCHECK_TIMEOUT_S = 280.0


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
    for node, answer in ask_all(nodes, "facts", lambda _: (checkpoints,)):
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
        for node, answer in ask_all(with_gpus, "gpucheck", lambda _: (_GPUCHECK_TIMEOUT_S,)):
            status, output = (1, answer.message) if isinstance(answer, ResourceError) else answer
            yield check_gpucheck(node.address, status, output)


def _connections(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Connect the nodes with each other, each to all addresses of the other."""
    listening = [answer for _, answer in ask_all(nodes, "listen", lambda _: ())]
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
