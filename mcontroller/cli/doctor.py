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
import uuid
from collections.abc import Callable, Iterator, Mapping
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


def _ray_nodes() -> dict[str, Node]:
    """Start an actor on every live node, and return by address what calls functions in it.

    Actors need no resources, so that they run on a cluster that is in use.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Agent:
        def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
            return function(*arguments)

    def started(node: str) -> Node:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        remote: Any = ray.remote  # its types have no classes with options
        agent = remote(num_cpus=0, scheduling_strategy=strategy)(Agent).remote()
        return lambda *call: agent.call.remote(*call).future()

    return {node["NodeManagerAddress"]: started(node["NodeID"]) for node in ray.nodes() if node["Alive"]}


def on_all(nodes: Mapping[str, Node], function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Call a function on all nodes at the same time, and return results by address; an exception is one too."""
    futures = {address: node(function, *arguments) for address, node in nodes.items()}
    wait(futures.values(), _ANSWER_TIMEOUT_S)
    late = TimeoutError(f"no answer in {_ANSWER_TIMEOUT_S:.0f} s")
    return {
        address: (future.exception() or future.result()) if future.done() else late
        for address, future in futures.items()
    }


def findings_of(nodes: Mapping[str, Node], checkpoints: str | None) -> Iterator[Finding]:
    """Yield the findings of all nodes; a node that does not answer is one of them, and is left out of the others."""
    by_node = on_all(nodes, versions)
    for address in [address for address, found in by_node.items() if isinstance(found, Exception)]:
        yield Finding("agent", address, True, _last_line(by_node.pop(address)))
    yield check_versions(by_node)
    nodes = {address: nodes[address] for address in by_node}
    sizes, drivers = on_all(nodes, shutil.disk_usage, "/dev/shm"), on_all(nodes, DRIVER.exists)
    for address in nodes:
        yield check_shared_memory(address, sizes[address].total, drivers[address])
    for address, errors in on_all(nodes, unreachable, on_all(nodes, listen)).items():
        yield Finding("ports", address, bool(errors), f"cannot reach {', '.join(errors)}" if errors else "reaches all")
    if checkpoints is not None:
        yield from _check_checkpoints(nodes, Path(checkpoints))


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


def check_shared_memory(address: str, size: int, has_driver: bool) -> Finding:
    """Compare the size of a node's /dev/shm [bytes] with what NCCL needs if the node has GPUs."""
    return Finding("shared memory", address, has_driver and size < SHARED_MEMORY, f"{size / (1 << 30):.1f} GiB")


def listen() -> int:
    """Listen on an ephemeral port, as NCCL and gloo do, until the process ends, and return it."""
    server = socket.create_server(("", 0), backlog=1024)
    port = int(server.getsockname()[1])
    server.detach()
    return port


def unreachable(ports: Mapping[str, int]) -> list[str]:
    """Connect to a port of each address, and return those that cannot be reached, with the reason."""
    errors = []
    for address, port in ports.items():
        try:
            socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            errors.append(f"{address}:{port} ({error})")
    return errors


def write(file: Path) -> None:
    """Create an empty file and its directory."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def _check_checkpoints(nodes: Mapping[str, Node], directory: Path) -> Iterator[Finding]:
    """Write a file in the directory of checkpoints on the first node, and look for it on all."""
    file, first = directory / f".doctor-{uuid.uuid4().hex}", dict([*nodes.items()][:1])
    failed = {address: error for address, error in on_all(first, write, file).items() if error is not None}
    # Listing a directory refreshes the cache of a network file system.
    for address, names in (failed or on_all(nodes, os.listdir, directory)).items():
        error = _last_line(names) if isinstance(names, Exception) else "" if file.name in names else "another directory"
        yield Finding("checkpoints", address, bool(error), f"{directory}: {error or 'has the file of the first node'}")
    on_all(first, Path.unlink, file)


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2]
