"""Checks of one node: pure functions from its facts to findings."""

from __future__ import annotations

from collections.abc import Iterator

from mcontroller.doctor.facts import NodeFacts
from mcontroller.doctor.findings import Finding, Verdict

__all__ = [
    "check_allocator",
    "check_gpus",
    "check_installed",
    "check_interfaces",
    "check_limits",
    "check_node",
    "check_paths",
    "check_shared_memory",
    "check_threads",
]

_GIB = 1 << 30


def check_node(node: NodeFacts, ranks: int | None) -> Iterator[Finding]:
    """Yield the findings of one node.

    Args:
        node: its facts.
        ranks: ranks of a run on the node; None for one for each GPU.
    """
    yield from check_installed(node)
    yield from check_gpus(node)
    yield from check_shared_memory(node)
    yield from check_limits(node)
    yield from check_threads(node, ranks if ranks is not None else max(1, node.ray_gpus or node.torch_gpus))
    yield from check_interfaces(node)
    yield from check_allocator(node)
    yield from check_paths(node)


def check_installed(node: NodeFacts) -> Iterator[Finding]:
    """Yield findings on packages that are missing or cannot be imported."""
    missing = [name for name in ("torch", "megatron-core", "tensordict") if name not in node.versions]
    if node.torch_problem is not None and "torch" not in missing:
        advice = "install the build of torch for this machine's CUDA, and repeat: python -c 'import torch'"
        yield Finding("packages", node.address, Verdict.FAILURE, node.torch_problem, advice)
    if missing:
        advice = "pip install 'mcontroller[gpu]', or put your builds on PYTHONPATH of the raylets (docs/install.md)"
        yield Finding("packages", node.address, Verdict.FAILURE, f"not installed: {', '.join(missing)}", advice)
    elif node.torch_problem is None:
        found = ", ".join(f"{name} {number}" for name, number in node.versions.items())
        yield Finding("packages", node.address, Verdict.OK, found)


def check_gpus(node: NodeFacts) -> Iterator[Finding]:
    """Compare the GPUs of the driver with those that torch can use, and with those that Ray counts."""
    driver, torch, ray = len(node.driver_gpus), node.torch_gpus, node.ray_gpus
    found = f"driver {driver}, torch {torch}" + ("" if ray is None else f", Ray {ray}")
    visible = node.variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found += f", CUDA_VISIBLE_DEVICES={visible!r}"
    verdict, advice = Verdict.OK, ""
    broken = node.versions.get("driver", "")
    if broken.startswith("broken"):
        verdict, found = Verdict.FAILURE, f"driver {broken}"
        advice = "run nvidia-smi on the node, and repair the driver"
    elif driver and not torch and visible is None:
        verdict = Verdict.FAILURE
        advice = f"torch {node.versions.get('torch')} cannot use them: install a CUDA build that the driver supports"
    elif ray is not None and ray > max(torch, driver):
        verdict = Verdict.FAILURE
        advice = "Ray counts GPUs that are not there: start the raylet with --num-gpus of the real number, or without"
    elif ray is not None and ray < torch:
        verdict = Verdict.WARNING
        advice = "Ray offers fewer GPUs than torch can use: start the raylet with --num-gpus of all of them"
    elif visible is None and torch and torch < driver:
        verdict = Verdict.WARNING
        advice = "torch can use fewer GPUs than the driver lists: run nvidia-smi and look for errors"
    if driver:
        found += f": {', '.join(sorted(set(node.driver_gpus)))}"
    yield Finding("gpus", node.address, verdict, found, advice)


def check_shared_memory(node: NodeFacts) -> Iterator[Finding]:
    """Compare /dev/shm with Ray's object store, and with what NCCL needs."""
    size, store = node.shared_memory_bytes, node.object_store_bytes
    found = f"/dev/shm {size / _GIB:.1f} GiB" + ("" if store is None else f", object store {store / _GIB:.1f} GiB")
    verdict, advice = Verdict.OK, ""
    if store is not None and size < store:
        verdict = Verdict.WARNING
        advice = "Ray then keeps objects on disk: docker run --shm-size, an emptyDir of medium Memory, or remount it"
    if size < _GIB and (node.driver_gpus or node.torch_gpus):
        verdict = Verdict.FAILURE
        advice = "NCCL needs shared memory: docker run --shm-size=16g or --ipc=host, or remount it"
    yield Finding("shared memory", node.address, verdict, found, advice)


_LIMITS = {
    # name: (failure below, warning below, advice)
    "nofile": (4096, 65536, "ulimit -n 1048576 before the raylet starts: Ray opens sockets for every worker"),
    "nproc": (4096, 32768, "ulimit -u unlimited before the raylet starts: every rank has dozens of threads"),
}


def check_limits(node: NodeFacts) -> Iterator[Finding]:
    """Judge the soft limits of processes: open files, processes, locked memory."""
    for name, (failure, warning, advice) in _LIMITS.items():
        limit = node.limits[name]
        verdict = Verdict.OK
        if limit != -1 and limit < warning:
            verdict = Verdict.FAILURE if limit < failure else Verdict.WARNING
        found = "unlimited" if limit == -1 else str(limit)
        yield Finding(f"ulimit {name}", node.address, verdict, found, "" if verdict is Verdict.OK else advice)
    locked = node.limits["memlock"]
    registers = locked != -1 and bool(node.driver_gpus)
    yield Finding(
        "ulimit memlock",
        node.address,
        Verdict.WARNING if registers else Verdict.OK,
        "unlimited" if locked == -1 else f"{locked >> 10} KiB",
        "InfiniBand registers memory: ulimit -l unlimited, or docker run --ulimit memlock=-1" if registers else "",
    )


def check_threads(node: NodeFacts, ranks: int) -> Iterator[Finding]:
    """Compare the OpenMP threads of all ranks with the cores.

    Ray sets OMP_NUM_THREADS of a worker to the CPUs that it asks for, 1 by default, unless the variable is set. Groups
    without GPUs divide the cores among their processes.
    """
    text = node.variables.get("OMP_NUM_THREADS")
    shown = f"OMP_NUM_THREADS={text if text is not None else 'not set'}, {ranks} ranks, {node.cores} cores"
    if text is not None and not text.split(",")[0].isdigit():
        advice = "set it to a number, or unset it: Ray then sets 1"
        yield Finding("threads", node.address, Verdict.FAILURE, shown, advice)
        return
    threads = int(text.split(",")[0]) if text is not None else (1 if node.ray_gpus is not None else node.cores)
    best = max(1, node.cores // ranks)
    if threads * ranks > node.cores and threads > 1:
        advice = (
            f"set OMP_NUM_THREADS={best} for the raylet: threads that wait for a core in turns made building an "
            "optimizer take 1,012 s instead of 26 s"
        )
        yield Finding("threads", node.address, Verdict.FAILURE, shown, advice)
    elif ranks > node.cores:
        advice = f"{ranks} ranks share {node.cores} cores: ask for more cores, or start fewer ranks"
        yield Finding("threads", node.address, Verdict.WARNING, shown, advice)
    else:
        yield Finding("threads", node.address, Verdict.OK, shown)


def interfaces_named(value: str, existing: list[str]) -> list[str]:
    """Return the interfaces that a value of NCCL_SOCKET_IFNAME selects.

    It is a list of prefixes; ``=`` in front selects exact names, ``^`` all others, and ``^=`` all but exact names.
    """
    text, excluded = value.removeprefix("^"), value.startswith("^")
    names, exact = text.removeprefix("=").split(","), text.startswith("=")
    matches = {each for each in existing for name in names if (each == name if exact else each.startswith(name))}
    return [each for each in existing if (each in matches) != excluded]


def check_interfaces(node: NodeFacts) -> Iterator[Finding]:
    """Check that the variables that name network interfaces select one that exists and is not the loopback."""
    existing = list(node.interfaces)
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = node.variables.get(variable)
        if value is None:
            continue
        chosen = (
            interfaces_named(value, existing)
            if variable.startswith("NCCL")
            else ([each for each in existing if each in value.split(",")])
        )
        found, verdict, advice = f"{variable}={value}", Verdict.OK, ""
        if not chosen:
            verdict, advice = Verdict.FAILURE, f"no such interface; the node has {', '.join(existing)}"
        elif all(each == "lo" for each in chosen) and not node.address.startswith("127."):
            verdict, advice = Verdict.WARNING, "the loopback reaches no other node: set it to the node's interface"
        yield Finding("interfaces", node.address, verdict, found, advice)


def check_allocator(node: NodeFacts) -> Iterator[Finding]:
    """Yield a finding if torch's allocator keeps memory that other processes cannot map, nor an engine free."""
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = node.variables.get(variable, "")
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            advice = (
                "leave expandable_segments out: neither CUDA IPC, which carries weights between groups on the same "
                "GPUs, nor the sleep of vLLM's engines works with it"
            )
            yield Finding("allocator", node.address, Verdict.WARNING, f"{variable}={value}", advice)


def check_paths(node: NodeFacts) -> Iterator[Finding]:
    """Check that files can be written in the directories of a run, and that there is room."""
    for path in node.paths:
        needed = path.purpose != "Hugging Face cache"
        found, verdict, advice = f"{path.path}: {path.free_bytes / _GIB:.1f} GiB free", Verdict.OK, ""
        if path.error is not None:
            found = f"{path.path}: {path.error}"
            verdict = Verdict.FAILURE if needed else Verdict.WARNING
            advice = "make it writable for the user of the raylet, or choose another directory" + (
                "" if needed else " with HF_HOME"
            )
        elif path.free_bytes < _GIB or (needed and path.free_bytes < 10 * _GIB):
            verdict = Verdict.FAILURE if path.free_bytes < _GIB and needed else Verdict.WARNING
            advice = "free space, or choose another directory"
        yield Finding(f"path {path.purpose}", node.address, verdict, found, advice)
