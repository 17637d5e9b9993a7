"""Checks of the nodes of a cluster: pure functions from facts to findings, and their table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcontroller.doctor.node import NodeFacts

OK, WARNING, FAILURE = "ok", "warning", "FAILURE"
"""Verdicts: with a warning a run may be slow or fail later; with a failure it fails or hangs."""
_GIB = 1 << 30
_LIMITS = {
    # name: (failure below, warning below, advice)
    "nofile": (4096, 65536, "ulimit -n 1048576 before the raylet starts: Ray opens sockets for every worker"),
    "nproc": (4096, 32768, "ulimit -u unlimited before the raylet starts: every rank has dozens of threads"),
    "memlock": (0, 1 << 30, "InfiniBand registers memory: ulimit -l unlimited, or docker run --ulimit memlock=-1"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict of one check.

    Attributes:
        check: name of the check.
        node: address of the node, or ``"all"``.
        verdict: of the check.
        facts: what was compared.
        advice: what to do about it, if the verdict is not ok.
    """

    check: str
    node: str
    verdict: str
    facts: str
    advice: str = ""


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if a check failed, otherwise 0: warnings do not stop a run."""
    return int(any(finding.verdict == FAILURE for finding in findings))


def table(findings: Sequence[Finding]) -> str:
    """Return the findings as a table, each with its advice in the next line, and the number of each verdict."""
    lines = []
    for finding in findings:
        cells = f"{finding.verdict:8} {finding.node:16} {finding.check:20} {finding.facts}"
        lines += [cells.rstrip()] + ([f"    -> {finding.advice}"] if finding.advice else [])
    verdicts = [finding.verdict for finding in findings]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in (OK, WARNING, FAILURE))
    return "\n".join([*lines, f"{len(findings)} checks: {counts}"])


def check_node(node: NodeFacts, ranks: int | None) -> Iterator[Finding]:
    """Yield the findings of one node.

    Args:
        node: its facts.
        ranks: ranks of a run on the node; None for one for each GPU.
    """

    def judged(check: str, facts: str, verdict: str, advice: str) -> Finding:
        return Finding(check, node.address, verdict, facts, "" if verdict == OK else advice)

    missing = [name for name in ("torch", "megatron-core", "tensordict") if name not in node.versions]
    broken = [f"{name} {text}" for name, text in node.versions.items() if text.startswith("broken")]
    versions = ", ".join(f"{name} {version}" for name, version in node.versions.items())
    wrong = "; ".join([*broken, *(f"{name} is not installed" for name in missing)])
    advice = "pip install 'mcontroller[gpu]', or put builds for this driver on PYTHONPATH of the raylets"
    yield judged("packages", wrong or versions, FAILURE if wrong else OK, advice)
    yield judged("gpus", *_gpus(node))
    shared = f"/dev/shm {node.shared_memory / _GIB:.1f} GiB, object store {node.object_store / _GIB:.1f} GiB"
    too_small = node.shared_memory < _GIB and bool(node.driver_gpus or node.torch_gpus)
    verdict = FAILURE if too_small else WARNING if node.shared_memory < node.object_store else OK
    advice = "NCCL and Ray's objects need shared memory: docker run --shm-size=16g or --ipc=host, or remount it"
    yield judged("shared memory", shared, verdict, advice)
    for name, (failure, warning, advice) in _LIMITS.items():
        limit = node.limits.get(name, -1)
        verdict = OK if limit == -1 or limit >= warning else FAILURE if limit < failure else WARNING
        applies = name != "memlock" or node.driver_gpus
        yield judged(f"ulimit {name}", "unlimited" if limit == -1 else str(limit), verdict if applies else OK, advice)
    yield judged("threads", *_threads(node, ranks or max(1, node.ray_gpus or node.torch_gpus)))
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if value := node.variables.get(variable):
            prefixes = variable.startswith("NCCL")
            exists = interfaces_named(value if prefixes else f"={value}", node.interfaces)
            advice = f"no such interface; the node has {', '.join(node.interfaces)}"
            yield judged("interfaces", f"{variable}={value}", OK if exists else FAILURE, advice)
    for path, free in node.free.items():
        text = free if isinstance(free, str) else f"{free / _GIB:.1f} GiB free"
        verdict = FAILURE if isinstance(free, str) or free < _GIB else WARNING if free < 10 * _GIB else OK
        yield judged("path", f"{path}: {text}", verdict, "make it writable for the user of the raylet, or free space")


def _gpus(node: NodeFacts) -> tuple[str, str, str]:
    """Compare the GPUs of the driver with the GPUs that torch can use, and that Ray counts."""
    driver, torch, ray = len(node.driver_gpus), node.torch_gpus, node.ray_gpus
    visible = node.variables.get("CUDA_VISIBLE_DEVICES")
    facts = f"driver {driver}, torch {torch}, Ray {ray}, CUDA_VISIBLE_DEVICES={visible}"
    if driver and not torch and visible is None:
        return facts, FAILURE, "torch cannot use them: install a CUDA build that the driver supports"
    if ray is not None and ray > max(torch, driver):
        return facts, FAILURE, "Ray counts GPUs that are not there: start the raylet with --num-gpus of the real number"
    if (ray is not None and ray < torch) or (visible is None and torch < driver):
        return facts, WARNING, "some GPUs are not used: compare nvidia-smi with --num-gpus of the raylet"
    return facts, OK, ""


def _threads(node: NodeFacts, ranks: int) -> tuple[str, str, str]:
    """Compare the OpenMP threads of all ranks with the cores; Ray sets 1 unless the raylet's variable is set."""
    text = node.variables.get("OMP_NUM_THREADS", "1" if node.ray_gpus is not None else str(node.cores)).split(",")[0]
    facts = f"OMP_NUM_THREADS={text}, {ranks} ranks, {node.cores} cores"
    if not text.isdigit() or (int(text) > 1 and int(text) * ranks > node.cores):
        best = max(1, node.cores // ranks)
        return facts, FAILURE, f"set OMP_NUM_THREADS={best} for the raylet: threads that share a core wait"
    advice = f"{ranks} ranks share {node.cores} cores: ask for more cores, or start fewer ranks"
    return facts, WARNING if ranks > node.cores else OK, advice


def interfaces_named(value: str, existing: Sequence[str]) -> list[str]:
    """Return the interfaces that a value of NCCL_SOCKET_IFNAME selects.

    It is a list of prefixes; ``=`` in front selects exact names, ``^`` all others, and ``^=`` all but exact names.
    """
    text, excluded = value.removeprefix("^"), value.startswith("^")
    names, exact = text.removeprefix("=").split(","), text.startswith("=")
    matches = {name for name in existing if (name in names if exact else name.startswith(tuple(names)))}
    return [name for name in existing if (name in matches) != excluded]


def check_versions(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a finding for every version that differs between nodes, or one that they are equal."""
    by_node = {node.address: {**node.versions, "GPU": ", ".join(sorted(set(node.driver_gpus)))} for node in nodes}
    names = dict.fromkeys(name for versions in by_node.values() for name in versions)
    different = [name for name in names if len({versions.get(name) for versions in by_node.values()}) > 1]
    for name in different:
        facts = "; ".join(f"{versions.get(name, 'not installed')} on {node}" for node, versions in by_node.items())
        advice = f"use one image for all nodes: ranks with different versions of {name} fail or hang in a collective"
        yield Finding(f"versions {name}", "all", WARNING if name in ("driver", "GPU") else FAILURE, facts, advice)
    if not different:
        yield Finding("versions", "all", OK, f"{len(names) - 1} packages are equal on {len(nodes)} nodes")


def check_clock(address: str, skew_s: float, uncertainty_s: float) -> Finding:
    """Judge how many seconds a node's clock is ahead; ``uncertainty_s`` is half of the time that asking took."""
    certain = max(0.0, abs(skew_s) - uncertainty_s)
    verdict = FAILURE if certain > 60 else WARNING if certain > 1 else OK
    advice = "start chrony or ntpd: logs, checkpoints and tokens of Ray are dated" if verdict != OK else ""
    return Finding("clock", address, verdict, f"{skew_s:+.3f} s (+-{uncertainty_s:.3f})", advice)


def check_shared_directory(path: str, visible: Mapping[str, bool]) -> Finding:
    """Judge whether a file that one node wrote is visible on all; ``visible`` says so by address."""
    others = [address for address, exists in visible.items() if not exists]
    if not others:
        return Finding("shared checkpoints", "all", OK, f"{path} is the same on {len(visible)} nodes")
    advice = "checkpoints need a file system that all nodes mount at the same path (NFS, Lustre, a shared volume)"
    return Finding("shared checkpoints", "all", FAILURE, f"{path} is another on {', '.join(others)}", advice)
