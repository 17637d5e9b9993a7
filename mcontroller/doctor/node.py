"""The agent on a node: it reads the node's facts, connects to other nodes, and writes files."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = {
    "mcontroller": "mcontroller",
    "torch": "torch",
    "ray": "ray",
    "megatron-core": "megatron.core",
    "transformer-engine": "transformer_engine",
    "tensordict": "tensordict",
}
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
_VARIABLES = ("OMP_", "CUDA_VISIBLE", "NCCL_SOCKET", "GLOO_SOCKET")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts of one node.

    Attributes:
        address: address of the node that other nodes use.
        versions: version by package; also of ``python``, and of ``CUDA``, ``NCCL`` and ``driver`` if there are any.
        driver_gpus: names of the GPUs that the driver lists; empty without a driver.
        torch_gpus: number of GPUs that torch can use.
        ray_gpus: GPUs that Ray counts on the node; None without Ray.
        cores: CPU cores that a process on the node may use.
        shared_memory: [bytes] size of /dev/shm; 0 if there is none.
        object_store: [bytes] size of Ray's object store on the node; 0 without Ray.
        limits: soft limits of a process, by name; -1 for unlimited.
        variables: the environment variables of processes of the node.
        interfaces: the network interfaces.
        free: [bytes] free for files by directory; an error as text if no file can be written in it.
    """

    address: str
    versions: Mapping[str, str]
    driver_gpus: tuple[str, ...] = ()
    torch_gpus: int = 0
    ray_gpus: int | None = None
    cores: int = 1
    shared_memory: int = 0
    object_store: int = 0
    limits: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    free: Mapping[str, int | str] = field(default_factory=dict)


class NodeAgent:
    """A node as the other nodes see it. Create it on the node, directly or as a Ray actor.

    Args:
        address: of the node.
        ray_resources: the node's resources as Ray counts them; None without Ray.
    """

    def __init__(self, address: str, ray_resources: Mapping[str, float] | None = None) -> None:
        self.address, self._resources = address, ray_resources
        # Ray sets variables in its workers; a run starts from the raylet's variables.
        parent = psutil.Process().parent() if ray_resources is not None else None
        self._variables: Mapping[str, str] = dict(os.environ) if parent is None else parent.environ()

    def facts(self, checkpoints: str | None) -> NodeFacts:
        """Return the facts of the node; ``checkpoints`` is the directory of checkpoints, if a run has one."""
        gpus, versions = _driver()
        torch_gpus, torch_versions = _torch()
        packages = {name: text for name, module in _PACKAGES.items() if (text := _version(name, module)) is not None}
        resources = self._resources or {}
        return NodeFacts(
            address=self.address,
            versions={"python": platform.python_version()} | packages | torch_versions | versions,
            driver_gpus=gpus,
            torch_gpus=torch_gpus,
            ray_gpus=None if self._resources is None else int(resources.get("GPU", 0)),
            cores=len(os.sched_getaffinity(0)),
            shared_memory=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
            object_store=int(resources.get("object_store_memory", 0)),
            limits={name: resource.getrlimit(limit)[0] for name, limit in _LIMITS.items()},
            variables={name: value for name, value in self._variables.items() if name.startswith(_VARIABLES)},
            interfaces=tuple(psutil.net_if_addrs()),
            free={path: free_bytes(path) for path in (tempfile.gettempdir(), checkpoints) if path is not None},
        )

    def now(self) -> float:
        """Return the time of the node's clock, in seconds since 1970."""
        return time.time()

    def listen(self) -> int:
        """Listen on an ephemeral port until the process ends, and return it."""
        self._listening = socket.create_server(("", 0), backlog=64)
        port: int = self._listening.getsockname()[1]
        return port

    def connect(self, address: str, port: int, timeout_s: float = 5.0) -> str | None:
        """Connect to a listening agent; return None, or why it cannot be reached."""
        try:
            socket.create_connection((address, port), timeout=timeout_s).close()
        except OSError as error:
            return "no answer in time" if isinstance(error, TimeoutError) else (error.strerror or str(error))
        return None

    def write(self, path: str) -> None:
        """Create an empty file."""
        Path(path).touch()

    def has(self, path: str) -> bool:
        """Return whether a file exists; listing its directory refreshes the cache of a network file system."""
        directory = Path(path).parent
        return directory.is_dir() and Path(path).name in os.listdir(directory)

    def remove(self, path: str) -> None:
        """Delete a file."""
        Path(path).unlink(missing_ok=True)


def free_bytes(directory: str) -> int | str:
    """Return the bytes that are free in a directory, which is made, or why no file can be written in it."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        path = Path(directory) / f".doctor-{uuid.uuid4().hex}"
        path.touch()
        path.unlink()
        return shutil.disk_usage(directory).free
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror}"


def _version(distribution: str, module: str) -> str | None:
    """Return the version of a package, or the folder of one on PYTHONPATH; None if there is neither."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        folder, _, _ = module.rpartition(".")
        if folder and importlib.util.find_spec(folder) is None:
            return None
        spec = importlib.util.find_spec(module)
        return None if spec is None or spec.origin is None else f"of {Path(spec.origin).parent}"


def _driver() -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of the GPUs that nvidia-smi lists, and the version of the driver."""
    if shutil.which("nvidia-smi") is None:
        return (), {}
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if listed.returncode != 0:
        text = (listed.stderr or listed.stdout).strip().partition("\n")[0]
        return (), {"driver": f"broken: {text}"}
    rows = [line.split(", ") for line in listed.stdout.strip().splitlines()]
    return tuple(row[0] for row in rows), {"driver": rows[0][-1]} if rows else {}


def _torch() -> tuple[int, dict[str, str]]:
    """Return the GPUs that torch can use, and the versions of CUDA and NCCL in it, or why it cannot be imported."""
    if importlib.util.find_spec("torch") is None:
        return 0, {}
    try:
        import torch
    except (ImportError, OSError) as error:
        return 0, {"torch": f"broken: {type(error).__name__}: {error}".partition("\n")[0]}
    if torch.version.cuda is None:
        return 0, {}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return torch.cuda.device_count(), {"CUDA": torch.version.cuda, "NCCL": nccl}
