"""Checks that compare nodes: pure functions from facts and measurements to findings."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from mcontroller.doctor.facts import NodeFacts
from mcontroller.doctor.findings import Finding, Verdict

__all__ = [
    "check_addresses",
    "check_clock",
    "check_connection",
    "check_gpucheck",
    "check_shared_directory",
    "check_versions",
    "connections_to_try",
]

_ALL_PAIRS = 8
_EXPECTED_TO_DIFFER = {"driver"}


def check_versions(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a finding for every version that differs between nodes, or one that they are equal."""
    names = dict.fromkeys(name for node in nodes for name in node.versions)
    differ = False
    for name in names:
        by_version: dict[str, list[str]] = {}
        for node in nodes:
            by_version.setdefault(node.versions.get(name, "not installed"), []).append(node.address)
        if len(by_version) == 1:
            continue
        differ = True
        found = "; ".join(f"{version} on {', '.join(where)}" for version, where in by_version.items())
        verdict = Verdict.WARNING if name in _EXPECTED_TO_DIFFER else Verdict.FAILURE
        advice = f"use one image for all nodes: ranks with different versions of {name} fail or hang in a collective"
        yield Finding(f"versions {name}", "all", verdict, found, advice)
    models = sorted({name for node in nodes for name in node.driver_gpus})
    if len(models) > 1:
        advice = "the slowest GPU sets the pace: use accelerator_type of RayResourcePool to separate them"
        yield Finding("versions GPU", "all", Verdict.WARNING, ", ".join(models), advice)
    if not differ:
        yield Finding("versions", "all", Verdict.OK, f"{len(names)} packages are equal on {len(nodes)} nodes")


def check_addresses(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Check that the nodes of a cluster do not know each other by loopback addresses."""
    for node in nodes:
        if len({each.hostname for each in nodes}) > 1 and ipaddress.ip_address(node.address).is_loopback:
            advice = "start the raylet with --node-ip-address of the network that the nodes share"
            yield Finding("address", node.address, Verdict.FAILURE, f"{node.hostname} is {node.address}", advice)


def connections_to_try(count: int) -> list[tuple[int, int]]:
    """Return pairs (from, to) of nodes: all of up to eight nodes, otherwise neighbors on a ring in both directions."""
    if count <= _ALL_PAIRS:
        return [(source, target) for source in range(count) for target in range(count) if source != target]
    ring = [(node, (node + 1) % count) for node in range(count)]
    return ring + [(target, source) for source, target in ring]


def check_connection(source: str, target: str, port: int, error: str | None) -> Finding:
    """Judge one attempt to connect.

    Args:
        source: address of the node that connects.
        target: address that it connects to.
        port: an ephemeral port on which the target listens, as NCCL and gloo use them.
        error: None if a byte went there and back.
    """
    if error is None:
        return Finding("ports", source, Verdict.OK, f"reaches {target}")
    advice = (
        f"allow TCP between the nodes on all ports (NCCL and gloo listen on ephemeral ones), or name an interface that "
        f"connects them with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; test: nc -vz {target} {port}"
    )
    return Finding("ports", source, Verdict.FAILURE, f"cannot reach {target}:{port}: {error}", advice)


def check_clock(address: str, skew_s: float, uncertainty_s: float) -> Finding:
    """Judge the difference between the clock of a node and that of this process.

    Args:
        address: of the node.
        skew_s: seconds by which the node's clock is ahead.
        uncertainty_s: half of the time that asking took.
    """
    certain = max(0.0, abs(skew_s) - uncertainty_s)
    verdict = Verdict.FAILURE if certain > 60 else Verdict.WARNING if certain > 1 else Verdict.OK
    advice = "" if verdict is Verdict.OK else "start chrony or ntpd: logs, checkpoints and tokens of Ray are dated"
    return Finding("clock", address, verdict, f"{skew_s:+.3f} s (+-{uncertainty_s:.3f})", advice)


def check_shared_directory(path: str, seen: Mapping[str, bool]) -> Finding:
    """Judge whether all nodes see a file that one of them wrote.

    Args:
        path: the directory of checkpoints.
        seen: by address of a node, whether it sees the file.
    """
    blind = [address for address, found in seen.items() if not found]
    if not blind:
        return Finding("shared checkpoints", "all", Verdict.OK, f"{path} is the same on {len(seen)} nodes")
    advice = "checkpoints need a file system that all nodes mount at the same path (NFS, Lustre, a shared volume)"
    return Finding("shared checkpoints", "all", Verdict.FAILURE, f"{path} is another on {', '.join(blind)}", advice)


def check_gpucheck(address: str, status: int, output: str) -> Finding:
    """Judge a run of ``gpucheck --part a --scale tiny`` on a node.

    Args:
        address: of the node.
        status: its exit status.
        output: what it printed.
    """
    lines = [line.strip() for line in output.strip().splitlines()] or ["it printed nothing"]
    if status == 0:
        summary = next((line for line in lines if " rows: " in line), lines[-1])
        return Finding("gpucheck", address, Verdict.OK, summary)
    failed = next((line for line in lines if line.split()[1:2] == ["failed"]), lines[-1])
    advice = "run python -m mcontroller gpucheck on the node; docs/gpu.md explains its rows"
    return Finding("gpucheck", address, Verdict.FAILURE, f"status {status}: {' '.join(failed.split())}", advice)
