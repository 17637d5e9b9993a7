"""Checks of the nodes of a cluster: pure functions from facts and measurements to findings, and their table."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mcontroller.doctor.facts import NodeFacts

_GIB = 1 << 30
_ALL_PAIRS = 8
_EXPECTED_TO_DIFFER = {"driver"}


class Verdict(StrEnum):
    """Verdict of a check."""

    OK = "ok"
    WARNING = "warning"
    """A run may be slow, or fail later."""
    FAILURE = "FAILURE"
    """A run fails, or hangs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict of one check.

    Attributes:
        check: name of the check.
        node: address of the node, or ``"all"``.
        verdict: of the check.
        found: what was found.
        advice: what to do about it; empty if the verdict is ok.
    """

    check: str
    node: str
    verdict: Verdict
    found: str
    advice: str = ""


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if a check failed, otherwise 0: warnings do not stop a run."""
    return int(any(finding.verdict is Verdict.FAILURE for finding in findings))


def table(findings: Sequence[Finding]) -> str:
    """Return the findings as a table, each with its advice in the next line, and the number of each verdict."""
    cells = [("check", "node", "verdict", "found")]
    cells += [(each.check, each.node, each.verdict.value, each.found) for each in findings]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    advised = [
        line + (f"\n    -> {finding.advice}" if finding.advice else "")
        for line, finding in zip(lines[1:], findings, strict=True)
    ]
    counts = Counter(finding.verdict for finding in findings)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
    return "\n".join([lines[0], *advised, f"{len(findings)} checks: {summary}"])


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
    if node.torch_error is not None and "torch" not in missing:
        advice = "install the build of torch for this machine's CUDA, and repeat: python -c 'import torch'"
        yield Finding("packages", node.address, Verdict.FAILURE, node.torch_error, advice)
    if missing:
        advice = "pip install 'mcontroller[gpu]', or put your builds on PYTHONPATH of the raylets (docs/install.md)"
        yield Finding("packages", node.address, Verdict.FAILURE, f"not installed: {', '.join(missing)}", advice)
    elif node.torch_error is None:
        found = ", ".join(f"{name} {number}" for name, number in node.versions.items())
        yield Finding("packages", node.address, Verdict.OK, found)


def check_gpus(node: NodeFacts) -> Iterator[Finding]:
    """Compare the GPUs of the driver with the GPUs that torch can use, and that Ray counts."""
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


# ---- several nodes --------------------------------------------------------------------------------------------------


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
    """Judge the difference between the clocks of a node and of this process.

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
