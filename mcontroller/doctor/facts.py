"""Facts of one node: versions, GPUs, limits, memory, paths and variables."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
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
_VARIABLES = (
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}


@dataclass(frozen=True, slots=True)
class PathFacts:
    """One directory of a node.

    Attributes:
        purpose: what it is for: ``tmp``, ``checkpoints`` or ``Hugging Face cache``.
        path: the directory.
        error: why no file can be written in it; None if one can.
        free_bytes: of its file system.
    """

    purpose: str
    path: str
    error: str | None
    free_bytes: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts of one node.

    Attributes:
        address: address of the node that other nodes use.
        hostname: its name.
        versions: version by package; also of ``python``, and of ``CUDA``, ``NCCL`` and ``driver`` if there are any.
        driver_gpus: names of the GPUs that the driver lists; empty without a driver.
        torch_gpus: number of GPUs that torch can use.
        torch_error: why torch cannot be imported; None if it can.
        cores: CPU cores that a process on the node may use.
        shared_memory_bytes: size of /dev/shm; 0 if there is none.
        limits: soft limits of a process, by name; -1 for unlimited.
        variables: the environment variables that are set for processes of the node.
        interfaces: addresses by network interface.
        paths: the directories that a run writes.
        ray_gpus: GPUs that Ray counts on the node; None without Ray.
        object_store_bytes: size of Ray's object store on the node; None without Ray.
    """

    address: str
    hostname: str
    versions: Mapping[str, str]
    driver_gpus: Sequence[str] = ()
    torch_gpus: int = 0
    torch_error: str | None = None
    cores: int = 1
    shared_memory_bytes: int = 0
    limits: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    interfaces: Mapping[str, Sequence[str]] = field(default_factory=dict)
    paths: Sequence[PathFacts] = ()
    ray_gpus: int | None = None
    object_store_bytes: int | None = None


def collect_facts(
    address: str,
    variables: Mapping[str, str],
    checkpoints: str | None,
    ray_resources: Mapping[str, float] | None = None,
) -> NodeFacts:
    """Return the facts of the node that this process runs on.

    Args:
        address: of the node.
        variables: environment variables of processes of the node.
        checkpoints: the directory of checkpoints; None to leave it out.
        ray_resources: the node's resources as Ray counts them; None without Ray.
    """
    gpus, driver = _driver()
    torch_versions, torch_gpus, error = _torch()
    installed = {name: found for name, module in _PACKAGES.items() if (found := _version(name, module)) is not None}
    home = Path(variables.get("HOME") or Path.home())
    cache = variables.get("HF_HOME") or str(home / ".cache" / "huggingface")
    directories = {"tmp": tempfile.gettempdir(), "checkpoints": checkpoints, "Hugging Face cache": cache}
    return NodeFacts(
        address=address,
        hostname=platform.node(),
        versions={"python": platform.python_version()} | installed | torch_versions | driver,
        driver_gpus=gpus,
        torch_gpus=torch_gpus,
        torch_error=error,
        cores=len(os.sched_getaffinity(0)),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        limits={name: resource.getrlimit(limit)[0] for name, limit in _LIMITS.items()},
        variables={name: variables[name] for name in _VARIABLES if name in variables},
        interfaces={name: [each.address for each in found] for name, found in psutil.net_if_addrs().items()},
        paths=[path_facts(purpose, path) for purpose, path in directories.items() if path is not None],
        ray_gpus=None if ray_resources is None else int(ray_resources.get("GPU", 0)),
        object_store_bytes=None if ray_resources is None else int(ray_resources.get("object_store_memory", 0)),
    )


def path_facts(purpose: str, path: str) -> PathFacts:
    """Return whether a file can be written in a directory, or in the one that it would be created in."""
    existing = Path(path).absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    error = None
    probe = existing / f".doctor-{uuid.uuid4().hex}"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as raised:
        error = f"{type(raised).__name__}: {raised.strerror}"
    return PathFacts(purpose, path, error, shutil.disk_usage(existing).free)


def _version(distribution: str, module: str) -> str | None:
    """Return the version of a package; for a checkout on PYTHONPATH, which has no metadata, its directory."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        pass
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        found = None
    return None if found is None or found.origin is None else f"of {Path(found.origin).parent}"


def _driver() -> tuple[list[str], dict[str, str]]:
    """Return the names of the GPUs that nvidia-smi lists, and the version of the driver."""
    if shutil.which("nvidia-smi") is None:
        return [], {}
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if listed.returncode != 0:
        text = (listed.stderr or listed.stdout).strip().partition("\n")[0]
        return [], {"driver": f"broken: {text}"}
    rows = [line.split(", ") for line in listed.stdout.strip().splitlines()]
    return [row[0] for row in rows], {"driver": rows[0][-1]} if rows else {}


def _torch() -> tuple[dict[str, str], int, str | None]:
    """Return the versions of CUDA and NCCL in torch, the GPUs that it can use, and why it cannot be imported."""
    if importlib.util.find_spec("torch") is None:
        return {}, 0, "torch is not installed"
    try:
        import torch
    except (ImportError, OSError) as error:
        return {}, 0, f"import torch: {type(error).__name__}: {error}".partition("\n")[0]
    if torch.version.cuda is None:
        return {}, 0, None
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"CUDA": torch.version.cuda, "NCCL": nccl}, torch.cuda.device_count(), None
