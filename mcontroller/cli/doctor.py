"""Check what the nodes of a Ray cluster get wrong together: versions, ports, shared memory, the checkpoints' directory.

Run this before a run on a new cluster, and gpucheck on a node of every kind. What is wrong with a node by itself, such
as a driver that is too old for torch, is reported by the start of a group. The exit status is 1 if a check failed, or
no cluster answers.

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
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from mcontroller.devices import DRIVER
from mcontroller.errors import ResourceError

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
Node = Callable[..., Future[Any]]
"""Calls a function, with arguments, in a process of a node, always the same one."""
_PACKAGES = ("mcontroller", "torch", "ray", "tensordict", "megatron-core", "transformer-engine", "vllm")
_ANSWER_TIMEOUT_S, _CONNECT_TIMEOUT_S = 300.0, 2.0


class Finding(NamedTuple):
    """The result of one check, a key of ``ADVICE``, of a node, or of ``"all"``."""

    check: str
    node: str
    failed: bool
    facts: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("--address", help="address of a Ray cluster; default: RAY_ADDRESS, or the one on this machine")
    parser.add_argument("--checkpoints", metavar="PATH", help="directory of checkpoints, which all nodes must share")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the table and return the exit status.

    Raises:
        ResourceError: no cluster answers.
    """
    import ray

    try:
        ray.init(
            arguments.address or "auto", log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True
        )
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        address = arguments.address or os.environ.get("RAY_ADDRESS", "this machine")
        raise ResourceError(f"no Ray cluster answers at {address}: {error}") from error
    status = 0
    for check, node, failed, facts in findings_of(_ray_nodes(), arguments.checkpoints):
        sys.stdout.write(f"{'FAILURE' if failed else 'ok':8} {node:16} {check:16} {facts}\n")
        if failed:
            status = 1
            sys.stdout.write(f"    -> {ADVICE[check]}\n")
    return status


class _Agent:
    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def _ray_nodes() -> dict[str, Node]:
    """Start an actor on every live node, and return by address what calls functions in it.

    Actors need no resources, so that they run on a cluster that is in use.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def started(node: str) -> Node:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        remote: Any = ray.remote  # its types have no classes with options
        agent = remote(num_cpus=0, scheduling_strategy=strategy)(_Agent).remote()
        return lambda *call: agent.call.remote(*call).future()

    return {node["NodeManagerAddress"]: started(node["NodeID"]) for node in ray.nodes() if node["Alive"]}


def findings_of(nodes: Mapping[str, Node], checkpoints: str | None) -> list[Finding]:
    """Return the findings of all nodes; a node that fails to answer is one, and is asked nothing more."""
    answering, findings = dict(nodes), list[Finding]()

    def ask(check: str, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """Call a function on all nodes at the same time, and return the results by address."""
        futures = {address: node(function, *arguments) for address, node in answering.items()}
        wait(futures.values(), _ANSWER_TIMEOUT_S)
        results = {}
        for address, future in futures.items():
            try:
                results[address] = future.result(timeout=0)
            except Exception as error:  # of any kind: the other nodes go on
                facts = str(error).strip().rpartition("\n")[2] or f"no answer in {_ANSWER_TIMEOUT_S:g} s"
                findings.append(Finding(check if isinstance(error, OSError) else "agent", address, True, facts))
                del answering[address]
        return results

    def run_on_each(check: str, function: Callable[..., tuple[bool, str]], *arguments: Any) -> None:
        findings.extend(Finding(check, node, *result) for node, result in ask(check, function, *arguments).items())

    findings.append(check_versions(ask("agent", versions)))
    run_on_each("shared memory", check_shared_memory)
    run_on_each("ports", check_ports, ask("ports", listen))
    if checkpoints is not None:
        try:
            Path(checkpoints).mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=checkpoints) as file:
                run_on_each("checkpoints", check_directory, Path(file.name))
        except OSError as error:
            findings.append(Finding("checkpoints", "this machine", True, str(error)))
    return findings


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


def check_versions(by_node: Mapping[str, Mapping[str, str]]) -> Finding:
    """Compare the versions of all nodes, by address; a package that only some have differs too."""
    names = dict.fromkeys(name for found in by_node.values() for name in found)
    by_name = {name: {address: found.get(name) for address, found in by_node.items()} for name in names}
    different = {name: found for name, found in by_name.items() if len(set(found.values())) > 1}
    equal = ", ".join(f"{name} {next(iter(found.values()))}" for name, found in by_name.items())
    facts = "; ".join(f"{name} is {found}" for name, found in different.items())
    return Finding("versions", "all", bool(different), facts or equal)


# ---- on each node: whether a check failed, and the facts -------------------------------------------------------------


def check_shared_memory() -> tuple[bool, str]:
    """Compare the size of /dev/shm with what NCCL needs if the node has GPUs."""
    size = shutil.disk_usage("/dev/shm").total
    return DRIVER.exists() and size < SHARED_MEMORY, f"{size / (1 << 30):.1f} GiB"


def listen() -> int:
    """Listen on an ephemeral port, as NCCL and gloo do, until the process ends, and return it."""
    server = socket.create_server(("", 0), backlog=1024)
    port = int(server.getsockname()[1])
    server.detach()
    return port


def check_ports(ports: Mapping[str, int]) -> tuple[bool, str]:
    """Connect to a port of each address."""
    errors = []
    for address, port in ports.items():
        try:
            socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            errors.append(f"{address}:{port} ({error})")
    return bool(errors), f"cannot reach {', '.join(errors)}" if errors else "reaches all"


def check_directory(file: Path) -> tuple[bool, str]:
    """Look for a file of another machine; listing a directory refreshes the cache of a network file system."""
    is_shared = file.name in os.listdir(file.parent)
    fault = "" if os.access(file.parent, os.W_OK) else "cannot be written"
    return bool(fault) or not is_shared, fault if is_shared else "another directory"
