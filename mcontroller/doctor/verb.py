"""Check what the nodes of a Ray cluster get wrong: packages, GPUs, memory, limits, network, shared checkpoints.

Run this before a run on a new cluster, and gpucheck on a node of every kind. It looks for a running cluster (--address,
RAY_ADDRESS, or the local one), and checks this machine only if there is none. Every line has a verdict, and what to do
about it. The exit status is 0 without failures, 1 with one, and 2 if the cluster of --address cannot be reached.

examples: mcontroller doctor
          mcontroller doctor --address 10.0.0.1:6379 --checkpoints /shared/checkpoints
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import resource
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

OK, WARNING, FAILURE = "ok", "warning", "FAILURE"
"""Verdicts: with a warning a run may be slow or fail later; with a failure it fails or hangs."""
UNREACHABLE = 2
"""Exit status if the cluster of ``--address`` cannot be reached."""
Call = Callable[..., Any]
"""Calls a method of the agent on a node: by its name, with its arguments."""
ADVICE = {
    "agent": "look at the raylet's log on the node; the node needs mcontroller on its PYTHONPATH",
    "packages": "pip install 'mcontroller[gpu]', or put builds for this driver on PYTHONPATH of the raylets",
    "gpus": "install a CUDA build of torch that the driver supports, and start the raylet with its number of GPUs",
    "shared memory": "NCCL and Ray's objects need it: docker run --shm-size=16g or --ipc=host, or remount /dev/shm",
    "open files": "ulimit -n 1048576 before the raylet starts: Ray opens sockets for every worker",
    "interfaces": "name an interface that the node has",
    "versions": "use one image for all nodes: ranks with different versions fail or hang in a collective",
    "ports": "allow TCP between the nodes on all ports (NCCL and gloo listen on ephemeral ones), or name an interface "
    "with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
    "checkpoints": "use a file system that all nodes mount at the same path (NFS, Lustre, a shared volume), writable "
    "for the raylets",
}
"""What to do about a check that is not ok."""
_PACKAGES = {"mcontroller": "mcontroller", "torch": "torch", "ray": "ray", "tensordict": "tensordict"} | {
    "megatron-core": "megatron.core",
    "transformer-engine": "transformer_engine",
    "vllm": "vllm",
}
_REQUIRED = ("torch", "megatron-core", "tensordict")
_ANSWER_TIMEOUT_S, _CONNECT_TIMEOUT_S = 300.0, 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict of one check, a key of ``ADVICE``, of a node, or of ``"all"``."""

    check: str
    node: str
    verdict: str
    facts: str


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts of one node.

    Attributes:
        versions: version by package, and of CUDA, NCCL and the driver if there are any.
        gpus: number of GPUs by who counts them: ``driver``, ``torch``, and ``Ray`` in a cluster.
        shared_memory: [bytes] size of /dev/shm.
        object_store: [bytes] size of Ray's object store; 0 without Ray.
        open_files: soft limit of open files; -1 for unlimited.
        variables: the environment variables that a run on the node starts from.
        interfaces: the network interfaces.
    """

    versions: Mapping[str, str]
    gpus: Mapping[str, int]
    shared_memory: int
    object_store: int = 0
    open_files: int = -1
    variables: Mapping[str, str] = field(default_factory=dict)
    interfaces: Sequence[str] = ()


class NodeAgent:
    """Reads the facts of the node that it runs on, connects to other nodes, and writes files.

    Args:
        ray_resources: the node's resources as Ray counts them; None without Ray.
    """

    def __init__(self, ray_resources: Mapping[str, float] | None = None) -> None:
        self._resources = ray_resources

    def facts(self) -> NodeFacts:
        """Return the facts of the node."""
        resources = self._resources or {}
        # Ray sets variables in its workers; a run starts from the raylet's variables.
        raylet = psutil.Process().parent() if self._resources is not None else None
        versions = {name: text for name, module in _PACKAGES.items() if (text := _version(name, module))}
        driver_gpus, driver = _driver()
        torch_gpus, torch_versions = _torch()
        counted = {} if self._resources is None else {"Ray": int(resources.get("GPU", 0))}
        return NodeFacts(
            versions={"python": sys.version.split()[0], **versions, **torch_versions, **driver},
            gpus={"driver": driver_gpus, "torch": torch_gpus, **counted},
            shared_memory=shutil.disk_usage("/dev/shm").total,
            object_store=int(resources.get("object_store_memory", 0)),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            variables=dict(os.environ) if raylet is None else raylet.environ(),
            interfaces=tuple(psutil.net_if_addrs()),
        )

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
        Path(path).unlink(missing_ok=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("--address", help="address of a Ray cluster; default: RAY_ADDRESS, or the one on this machine")
    parser.add_argument("--local", action="store_true", help="check this machine only")
    parser.add_argument("--checkpoints", metavar="PATH", help="directory of checkpoints, which all nodes must share")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the table and return the exit status."""
    try:
        connected = not arguments.local and _connect(arguments.address)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        where = arguments.address or f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}"
        sys.stderr.write(f"doctor: no Ray cluster answers at {where}: {reason}\n")
        return UNREACHABLE
    nodes = _ray_nodes() if connected else {socket.gethostname(): _caller(NodeAgent())}
    sys.stdout.write("the Ray cluster\n" if connected else "this machine; it runs no Ray cluster to compare nodes of\n")
    failed = False
    for finding in findings_of(nodes, arguments.checkpoints):
        failed |= finding.verdict == FAILURE
        sys.stdout.write(f"{finding.verdict:8} {finding.node:16} {finding.check:20} {finding.facts}\n")
        if finding.verdict != OK:
            sys.stdout.write(f"    -> {ADVICE[finding.check]}\n")
    return int(failed)


def findings_of(nodes: Mapping[str, Call], checkpoints: str | None) -> Iterator[Finding]:
    """Yield the findings of all nodes; a node that does not answer is one of them, and is left out of the others."""
    facts: dict[str, NodeFacts] = {}
    for address, call in nodes.items():
        try:
            facts[address] = call("facts")
        except Exception as error:  # Ray has many types
            yield Finding("agent", address, FAILURE, _last_line(error))
        else:
            yield from check_node(address, facts[address])
    nodes = {address: nodes[address] for address in facts}
    if len(nodes) > 1:
        yield check_versions(facts)
        yield from _check_ports(nodes)
    if checkpoints is not None and nodes:
        yield _check_checkpoints(nodes, checkpoints)


def check_node(address: str, node: NodeFacts) -> Iterator[Finding]:
    """Yield the findings of one node."""
    wrong = [f"{name} {text}" for name, text in node.versions.items() if text.startswith("broken")]
    wrong += [f"{name} is not installed" for name in _REQUIRED if name not in node.versions]
    versions = ", ".join(f"{name} {text}" for name, text in node.versions.items())
    yield Finding("packages", address, FAILURE if wrong else OK, "; ".join(wrong) or versions)

    visible = node.variables.get("CUDA_VISIBLE_DEVICES")
    driver, torch = node.gpus["driver"], node.gpus["torch"]
    ray = node.gpus.get("Ray", torch)
    facts = ", ".join(f"{who} {count}" for who, count in node.gpus.items()) + f", CUDA_VISIBLE_DEVICES={visible}"
    unusable = (driver and not torch and visible is None) or ray > max(torch, driver)
    verdict = FAILURE if unusable else WARNING if ray < torch or (visible is None and torch < driver) else OK
    yield Finding("gpus", address, verdict, facts)

    gib = 1 << 30
    facts = f"/dev/shm {node.shared_memory / gib:.1f} GiB, object store {node.object_store / gib:.1f} GiB"
    verdict = FAILURE if driver and node.shared_memory < gib else WARNING
    verdict = OK if node.shared_memory >= max(node.object_store, gib if driver else 0) else verdict
    yield Finding("shared memory", address, verdict, facts)

    few = 0 <= node.open_files < 65536
    verdict = FAILURE if few and node.open_files < 4096 else WARNING if few else OK
    yield Finding("open files", address, verdict, str(node.open_files))

    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if value := node.variables.get(variable):
            exists = selects_interface(value if variable.startswith("NCCL") else f"={value}", node.interfaces)
            facts = f"{variable}={value}; the node has {', '.join(node.interfaces)}"
            yield Finding("interfaces", address, OK if exists else FAILURE, facts)


def selects_interface(value: str, existing: Sequence[str]) -> bool:
    """Return whether a value of NCCL_SOCKET_IFNAME selects one of the existing interfaces.

    It is a list of prefixes; ``=`` in front selects exact names, ``^`` all others, and ``^=`` all but exact names.
    """
    text, excluded = value.removeprefix("^"), value.startswith("^")
    names, exact = tuple(text.removeprefix("=").split(",")), text.startswith("=")
    return any((name in names if exact else name.startswith(names)) != excluded for name in existing)


def check_versions(facts: Mapping[str, NodeFacts]) -> Finding:
    """Compare the versions of all nodes, by address."""
    names = dict.fromkeys(name for node in facts.values() for name in node.versions)
    by_name = {name: {address: node.versions.get(name) for address, node in facts.items()} for name in names}
    different = {name: versions for name, versions in by_name.items() if len(set(versions.values())) > 1}
    text = "; ".join(f"{name} is {versions}" for name, versions in different.items())
    verdict = OK if not different else WARNING if set(different) == {"driver"} else FAILURE
    return Finding("versions", "all", verdict, text or f"{len(names)} are equal on {len(facts)} nodes")


def _check_ports(nodes: Mapping[str, Call]) -> Iterator[Finding]:
    """Connect every node to all others."""
    ports = {address: call("listen") for address, call in nodes.items()}
    for address, call in nodes.items():
        errors = call("unreachable", {other: port for other, port in ports.items() if other != address})
        text = "; ".join(f"{target}: {error}" for target, error in errors.items())
        facts = f"cannot reach {text}" if errors else f"reaches {len(nodes) - 1} nodes"
        yield Finding("ports", address, FAILURE if errors else OK, facts)


def _check_checkpoints(nodes: Mapping[str, Call], directory: str) -> Finding:
    """Write a file in the directory of checkpoints on one node, and look for it on all."""
    path = str(Path(directory) / f".doctor-{uuid.uuid4().hex}")
    first = next(iter(nodes.values()))
    try:
        first("write", path)
        missing = [address for address, call in nodes.items() if not call("has", path)]
        first("remove", path)
    except Exception as error:  # an OSError of the node, in an error of Ray
        return Finding("checkpoints", "all", FAILURE, _last_line(error))
    facts = (
        f"{directory} is another on {', '.join(missing)}" if missing else f"{directory} is one on {len(nodes)} nodes"
    )
    return Finding("checkpoints", "all", FAILURE if missing else OK, facts)


def _connect(address: str | None) -> bool:
    """Connect to a cluster that runs, and return whether there is one; a given address must be reachable."""
    if importlib.util.find_spec("ray") is None:
        return False
    import ray

    try:
        ray.init(address or "auto", log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    except ConnectionError:
        if address is not None or "RAY_ADDRESS" in os.environ:
            raise
        return False
    return True


def _caller(agent: NodeAgent) -> Call:
    return lambda method, *arguments: getattr(agent, method)(*arguments)


def _ray_nodes() -> dict[str, Call]:
    """Start an agent on every live node, and return by address what calls it.

    Agents need no resources, so that they run on a cluster that is in use.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}})(NodeAgent)

    def started(node: dict[str, Any]) -> Call:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        agent = remote.options(scheduling_strategy=strategy).remote(node["Resources"])
        return lambda method, *arguments: ray.get(getattr(agent, method).remote(*arguments), timeout=_ANSWER_TIMEOUT_S)

    return {node["NodeManagerAddress"]: started(node) for node in ray.nodes() if node["Alive"]}


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2]


def _version(distribution: str, module: str) -> str | None:
    """Return the version of a package, or that it is a folder on PYTHONPATH; None if it is neither."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        pass
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the package that it is in
        return None
    return f"of {Path(spec.origin).parent}" if spec is not None and spec.origin is not None else None


def _driver() -> tuple[int, dict[str, str]]:
    """Return the number of GPUs that nvidia-smi lists, and the version of the driver."""
    if shutil.which("nvidia-smi") is None:
        return 0, {}
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if listed.returncode != 0:
        return 0, {"driver": f"broken: {_last_line(RuntimeError(listed.stderr or listed.stdout))}"}
    versions = listed.stdout.split()
    return len(versions), {"driver": versions[0]} if versions else {}


def _torch() -> tuple[int, dict[str, str]]:
    """Return the GPUs that torch can use, and the versions of CUDA and NCCL in it, or why it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return 0, {"torch": f"broken: {_last_line(error)}"} if importlib.util.find_spec("torch") else {}
    if torch.version.cuda is None:
        return 0, {}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return torch.cuda.device_count(), {"CUDA": torch.version.cuda, "NCCL": nccl}
