"""Check what the nodes of a Ray cluster get wrong together: versions, ports, shared memory, the checkpoints' directory.

Run this before a run on a new cluster, and gpucheck on a node of every kind. What is wrong with a node by itself, such
as a driver that is too old for torch, is reported by the start of a group. The exit status is 0 without failures, 1
with one, and 2 if no cluster answers.

examples: mcontroller doctor
          mcontroller doctor --address 10.0.0.1:6379 --checkpoints /shared/checkpoints
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mcontroller.devices import DRIVER

UNREACHABLE = 2
"""Exit status if no cluster answers."""
SHARED_MEMORY = 1 << 30
"""[bytes] The least size of /dev/shm on a node with GPUs; containers have 64 MiB by default."""
ADVICE = {
    "agent": "look at the raylet's log on the node; the node needs mcontroller on its PYTHONPATH",
    "versions": "use one image for all nodes: ranks with different versions fail or hang in a collective",
    "shared memory": "NCCL needs it: docker run --shm-size=16g or --ipc=host, or remount /dev/shm",
    "ports": "allow TCP between the nodes on all ports (NCCL and gloo listen on ephemeral ones)",
    "checkpoints": "use a file system that all nodes mount at the same path, and that the raylets can write",
}
"""What to do about a check that failed."""
Call = Callable[..., Any]
"""Calls a method of the agent on a node: by its name, with its arguments."""
_PACKAGES = ("mcontroller", "torch", "ray", "tensordict", "megatron-core", "transformer-engine", "vllm")
_ANSWER_TIMEOUT_S, _CONNECT_TIMEOUT_S = 300.0, 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, a key of ``ADVICE``, of a node, or of ``"all"``."""

    check: str
    node: str
    failed: bool
    facts: str


class NodeAgent:
    """Reads facts of the node that it runs on, connects to other nodes, and writes a file."""

    def versions(self) -> dict[str, str]:
        """Return the version of each package that is installed, and of Python, CUDA and NCCL."""
        return versions()

    def shared_memory(self) -> tuple[int, bool]:
        """Return the size of /dev/shm [bytes], and whether the node has a driver for GPUs."""
        return shutil.disk_usage("/dev/shm").total, DRIVER.exists()

    def listen(self) -> int:
        """Listen on an ephemeral port, as NCCL and gloo do, until the process ends, and return it."""
        self._listening = socket.create_server(("", 0), backlog=1024)
        return int(self._listening.getsockname()[1])

    def unreachable(self, ports: Mapping[str, int]) -> dict[str, str]:
        """Connect to other nodes, and return by ``address:port`` why some cannot be reached."""
        errors = {}
        for address, port in ports.items():
            try:
                socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S).close()
            except OSError as error:
                errors[f"{address}:{port}"] = str(error)
        return errors

    def write(self, path: str) -> None:
        """Create an empty file and its directory."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()

    def has(self, path: str) -> bool:
        """Return whether a file exists; listing its directory refreshes the cache of a network file system."""
        directory = Path(path).parent
        return directory.is_dir() and Path(path).name in os.listdir(directory)

    def remove(self, path: str) -> None:
        """Delete a file."""
        Path(path).unlink()


def versions() -> dict[str, str]:
    """Return the version of each package that this process can import, and of Python, CUDA and NCCL."""
    import torch

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found |= {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, nccl))}
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("--address", help="address of a Ray cluster; default: RAY_ADDRESS, or the one on this machine")
    parser.add_argument("--checkpoints", metavar="PATH", help="directory of checkpoints, which all nodes must share")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the table and return the exit status."""
    import ray

    try:
        ray.init(
            arguments.address or "auto", log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True
        )
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        address = arguments.address or os.environ.get("RAY_ADDRESS", "this machine")
        reason = str(error).strip().partition("\n")[0]
        sys.stderr.write(f"doctor: no Ray cluster answers at {address}: {reason}\n")
        return UNREACHABLE
    failed = False
    for finding in findings_of(_ray_nodes(), arguments.checkpoints):
        failed |= finding.failed
        verdict = "FAILURE" if finding.failed else "ok"
        sys.stdout.write(f"{verdict:8} {finding.node:16} {finding.check:16} {finding.facts}\n")
        if finding.failed:
            sys.stdout.write(f"    -> {ADVICE[finding.check]}\n")
    return int(failed)


def findings_of(nodes: Mapping[str, Call], checkpoints: str | None) -> Iterator[Finding]:
    """Yield the findings of all nodes; a node that does not answer is one of them, and is left out of the others."""
    by_node: dict[str, dict[str, str]] = {}
    for address, call in nodes.items():
        try:
            by_node[address] = call("versions")
        except Exception as error:  # Ray has many types
            yield Finding("agent", address, True, _last_line(error))
    nodes = {address: nodes[address] for address in by_node}
    yield check_versions(by_node)
    for address, call in nodes.items():
        yield check_shared_memory(address, *call("shared_memory"))
    yield from _check_ports(nodes)
    if checkpoints is not None and nodes:
        yield _check_checkpoints(nodes, checkpoints)


def check_versions(by_node: Mapping[str, Mapping[str, str]]) -> Finding:
    """Compare the versions of all nodes, by address; a package that only some have differs too."""
    names = dict.fromkeys(name for found in by_node.values() for name in found)
    by_name = {name: {address: found.get(name) for address, found in by_node.items()} for name in names}
    different = {name: found for name, found in by_name.items() if len(set(found.values())) > 1}
    equal = ", ".join(f"{name} {next(iter(found.values()))}" for name, found in by_name.items())
    facts = "; ".join(f"{name} is {found}" for name, found in different.items())
    return Finding("versions", "all", bool(different), facts or equal)


def check_shared_memory(address: str, size: int, has_driver: bool) -> Finding:
    """Compare the size of a node's /dev/shm [bytes] with what NCCL needs if the node has GPUs."""
    return Finding("shared memory", address, has_driver and size < SHARED_MEMORY, f"{size / (1 << 30):.1f} GiB")


def _check_ports(nodes: Mapping[str, Call]) -> Iterator[Finding]:
    """Connect every node to all others."""
    ports = {address: call("listen") for address, call in nodes.items()}
    for address, call in nodes.items():
        errors = call("unreachable", {other: port for other, port in ports.items() if other != address})
        text = "; ".join(f"{target}: {error}" for target, error in errors.items())
        yield Finding("ports", address, bool(errors), f"cannot reach {text}" if errors else "reaches all")


def _check_checkpoints(nodes: Mapping[str, Call], directory: str) -> Finding:
    """Write a file in the directory of checkpoints on one node, and look for it on all."""
    path = str(Path(directory) / f".doctor-{uuid.uuid4().hex}")
    first = next(iter(nodes.values()))
    try:
        first("write", path)
        missing = [address for address, call in nodes.items() if not call("has", path)]
        first("remove", path)
    except Exception as error:  # an OSError of the node, in an error of Ray
        return Finding("checkpoints", "all", True, _last_line(error))
    facts = f"another directory on {', '.join(missing)}" if missing else f"one on {len(nodes)} nodes"
    return Finding("checkpoints", "all", bool(missing), f"{directory}: {facts}")


def _ray_nodes() -> dict[str, Call]:
    """Start an agent on every live node, and return by address what calls it.

    Agents need no resources, so that they run on a cluster that is in use.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0)(NodeAgent)

    def started(node: str) -> Call:
        agent = remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        return lambda method, *arguments: ray.get(getattr(agent, method).remote(*arguments), timeout=_ANSWER_TIMEOUT_S)

    return {node["NodeManagerAddress"]: started(node["NodeID"]) for node in ray.nodes() if node["Alive"]}


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2]
