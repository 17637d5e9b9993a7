"""Every check of doctor: right facts are ok, a wrong one has a verdict and an advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from mcontroller.doctor import checks
from mcontroller.doctor.checks import Finding, Verdict, exit_status, table
from mcontroller.doctor.facts import NodeFacts, PathFacts, path_facts

GIB = 1 << 30
OK, WARNING, FAILURE = Verdict.OK, Verdict.WARNING, Verdict.FAILURE
NODE = NodeFacts(
    address="10.0.0.1",
    hostname="first",
    versions={
        "python": "3.11.7",
        "torch": "2.13.0",
        "megatron-core": "0.16.1",
        "tensordict": "0.15.3",
        "CUDA": "12.8",
        "driver": "570.1",
    },
    driver_gpus=["NVIDIA H200"] * 8,
    torch_gpus=8,
    cores=64,
    shared_memory_bytes=200 * GIB,
    limits={"nofile": 1 << 20, "nproc": -1, "memlock": -1},
    interfaces={"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "ib0": ["192.168.0.1"], "ib1": ["192.168.1.1"]},
    paths=[PathFacts("tmp", "/tmp", None, 500 * GIB), PathFacts("checkpoints", "/shared", None, 900 * GIB)],
    ray_gpus=8,
    object_store_bytes=100 * GIB,
)


def node(**changes: Any) -> NodeFacts:
    return dataclasses.replace(NODE, **changes)


def versions(**changes: str | None) -> dict[str, str]:
    changed = {**NODE.versions, **changes}
    return {name: number for name, number in changed.items() if number is not None}


def threads(facts: NodeFacts, ranks: int = 8) -> Iterable[Finding]:
    return checks.check_threads(facts, ranks)


Check = Callable[[NodeFacts], Iterable[Finding]]
WRONG: dict[str, tuple[Check, NodeFacts, Verdict, str]] = {
    "no megatron-core": (
        checks.check_installed,
        node(versions={"torch": "2.13.0", "tensordict": "0.15.3"}),
        FAILURE,
        "not installed: megatron-core",
    ),
    "torch that does not import": (
        checks.check_installed,
        node(torch_error="import torch: OSError: libcudart.so.12", torch_gpus=0),
        FAILURE,
        "libcudart.so.12",
    ),
    "torch without CUDA": (checks.check_gpus, node(torch_gpus=0, ray_gpus=0), FAILURE, "driver 8, torch 0, Ray 0"),
    "a broken driver": (
        checks.check_gpus,
        node(driver_gpus=[], torch_gpus=0, ray_gpus=0, versions=versions(driver="broken: version mismatch")),
        FAILURE,
        "driver broken: version mismatch",
    ),
    "GPUs that only Ray has": (checks.check_gpus, node(ray_gpus=16), FAILURE, "Ray 16"),
    "GPUs that Ray does not offer": (checks.check_gpus, node(ray_gpus=4), WARNING, "Ray 4"),
    "a GPU that torch cannot use": (checks.check_gpus, node(torch_gpus=7, ray_gpus=7), WARNING, "torch 7"),
    "shared memory of a container": (
        checks.check_shared_memory,
        node(shared_memory_bytes=64 << 20),
        FAILURE,
        "/dev/shm 0.1 GiB",
    ),
    "less shared memory than objects": (
        checks.check_shared_memory,
        node(shared_memory_bytes=50 * GIB),
        WARNING,
        "object store 100.0 GiB",
    ),
    "few open files": (
        checks.check_limits,
        node(limits={"nofile": 1024, "nproc": -1, "memlock": -1}),
        FAILURE,
        "1024",
    ),
    "rather few open files": (
        checks.check_limits,
        node(limits={"nofile": 20000, "nproc": -1, "memlock": -1}),
        WARNING,
        "20000",
    ),
    "few processes": (checks.check_limits, node(limits={"nofile": -1, "nproc": 512, "memlock": -1}), FAILURE, "512"),
    "little locked memory": (
        checks.check_limits,
        node(limits={"nofile": -1, "nproc": -1, "memlock": 64 << 10}),
        WARNING,
        "64 KiB",
    ),
    "too many threads": (threads, node(variables={"OMP_NUM_THREADS": "9"}), FAILURE, "OMP_NUM_THREADS=9, 8 ranks, 64"),
    "threads without a number": (threads, node(variables={"OMP_NUM_THREADS": "all"}), FAILURE, "OMP_NUM_THREADS=all"),
    "all cores for every rank": (threads, node(ray_gpus=None), FAILURE, "OMP_NUM_THREADS=not set"),
    "more ranks than cores": (threads, node(cores=4), WARNING, "8 ranks, 4 cores"),
    "an interface that is not there": (
        checks.check_interfaces,
        node(variables={"NCCL_SOCKET_IFNAME": "bond0"}),
        FAILURE,
        "NCCL_SOCKET_IFNAME=bond0",
    ),
    "a prefix in gloo's variable": (
        checks.check_interfaces,
        node(variables={"GLOO_SOCKET_IFNAME": "ib"}),
        FAILURE,
        "GLOO_SOCKET_IFNAME=ib",
    ),
    "segments that cannot be exported": (
        checks.check_allocator,
        node(variables={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}),
        WARNING,
        "expandable_segments: True",
    ),
    "the loopback": (checks.check_interfaces, node(variables={"NCCL_SOCKET_IFNAME": "lo"}), WARNING, "=lo"),
    "a path that is read-only": (
        checks.check_paths,
        node(paths=[PathFacts("checkpoints", "/shared", "OSError: Read-only file system", 900 * GIB)]),
        FAILURE,
        "/shared: OSError: Read-only file system",
    ),
    "a cache that is read-only": (
        checks.check_paths,
        node(paths=[PathFacts("Hugging Face cache", "/cache", "PermissionError: Permission denied", GIB)]),
        WARNING,
        "/cache",
    ),
    "a full disk": (
        checks.check_paths,
        node(paths=[PathFacts("tmp", "/tmp", None, 100 << 20)]),
        FAILURE,
        "/tmp: 0.1 GiB free",
    ),
    "little room": (checks.check_paths, node(paths=[PathFacts("tmp", "/tmp", None, 5 * GIB)]), WARNING, "5.0 GiB"),
}


@pytest.mark.parametrize(("check", "facts", "verdict", "found"), WRONG.values(), ids=WRONG)
def test_a_wrong_fact_has_a_verdict_and_an_advice(check: Check, facts: NodeFacts, verdict: Verdict, found: str) -> None:
    assert {finding.verdict for finding in check(NODE)} <= {OK}
    wrong = [finding for finding in check(facts) if finding.verdict is not OK]
    assert [finding.verdict for finding in wrong] == [verdict]
    assert found in wrong[0].found and wrong[0].advice and wrong[0].node == "10.0.0.1"
    assert exit_status(wrong) == int(verdict is FAILURE)


def test_a_good_node_is_ok_in_everything() -> None:
    findings = list(checks.check_node(NODE, ranks=None))
    assert {finding.verdict for finding in findings} == {OK} and exit_status(findings) == 0
    assert not any(finding.advice for finding in findings)


def test_one_thread_too_many_is_explained_with_the_right_number() -> None:
    (finding,) = threads(node(variables={"OMP_NUM_THREADS": "9"}))
    assert "set OMP_NUM_THREADS=8" in finding.advice and "1,012 s instead of 26 s" in finding.advice
    (right,) = threads(node(variables={"OMP_NUM_THREADS": "8"}))
    assert right.verdict is OK
    (of_ray,) = threads(node())  # Ray sets 1 if the raylet has none
    assert of_ray.verdict is OK


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("eth", ["eth0"]),
        ("ib0,eth0", ["eth0", "ib0"]),
        ("=ib", []),
        ("=ib1", ["ib1"]),
        ("^lo,ib", ["eth0"]),
        ("^=ib0", ["lo", "eth0", "ib1"]),
    ],
)
def test_interfaces_are_selected_as_nccl_does(value: str, chosen: Sequence[str]) -> None:
    assert checks.interfaces_named(value, list(NODE.interfaces)) == chosen


def test_versions_that_differ_fail_and_name_the_nodes() -> None:
    second = node(address="10.0.0.2", versions=versions(torch="2.12.1"))
    findings = list(checks.check_versions([NODE, second]))
    assert [(each.check, each.verdict) for each in findings] == [("versions torch", FAILURE)]
    assert findings[0].found == "2.13.0 on 10.0.0.1; 2.12.1 on 10.0.0.2"
    assert [each.verdict for each in checks.check_versions([NODE, NODE])] == [OK]


def test_a_package_that_one_node_lacks_fails_and_another_driver_warns() -> None:
    second = node(address="10.0.0.2", versions=versions(driver="560.2", tensordict=None))
    verdicts = {each.check: each.verdict for each in checks.check_versions([NODE, second])}
    assert verdicts == {"versions tensordict": FAILURE, "versions driver": WARNING}


def test_other_gpus_on_another_node_warn() -> None:
    second = node(address="10.0.0.2", driver_gpus=["NVIDIA A100"] * 8)
    verdicts = {each.check: each.verdict for each in checks.check_versions([NODE, second])}
    assert verdicts == {"versions GPU": WARNING, "versions": OK}


def test_loopback_addresses_of_two_machines_fail() -> None:
    second = node(address="127.0.0.1", hostname="second")
    (finding,) = checks.check_addresses([NODE, second])
    assert finding.verdict is FAILURE and finding.found == "second is 127.0.0.1"
    assert not list(checks.check_addresses([NODE, node(address="10.0.0.2", hostname="second")]))


def test_few_nodes_connect_in_all_pairs_and_many_in_a_ring() -> None:
    assert checks.connections_to_try(2) == [(0, 1), (1, 0)]
    assert len(checks.connections_to_try(8)) == 56
    ring = checks.connections_to_try(100)
    assert len(ring) == 200 and (99, 0) in ring and (0, 99) in ring


def test_a_port_that_cannot_be_reached_fails() -> None:
    assert checks.check_connection("10.0.0.1", "10.0.0.2", 4711, None).verdict is OK
    finding = checks.check_connection("10.0.0.1", "10.0.0.2", 4711, "no answer in time")
    assert finding.verdict is FAILURE and finding.found == "cannot reach 10.0.0.2:4711: no answer in time"
    assert "nc -vz 10.0.0.2 4711" in finding.advice


@pytest.mark.parametrize(
    ("skew", "uncertainty", "verdict"),
    [(0.4, 0.01, OK), (-3.0, 0.01, WARNING), (3.0, 2.5, OK), (-3600.0, 0.1, FAILURE)],
)
def test_clocks_that_differ_are_reported(skew: float, uncertainty: float, verdict: Verdict) -> None:
    assert checks.check_clock("10.0.0.1", skew, uncertainty).verdict is verdict


def test_a_directory_that_is_not_shared_fails() -> None:
    assert checks.check_shared_directory("/shared", {"10.0.0.1": True, "10.0.0.2": True}).verdict is OK
    finding = checks.check_shared_directory("/shared", {"10.0.0.1": True, "10.0.0.2": False})
    assert finding.verdict is FAILURE and finding.found == "/shared is another on 10.0.0.2"


def test_a_failed_gpucheck_fails_with_its_row() -> None:
    printed = (
        '{"name": "scores dense float32", "result": "failed"}\n'
        "a  failed   scores dense float32    value 0.5 (at most 0.0002)\n14 rows: 13 passed, 1 failed, 0 skipped\n"
    )
    finding = checks.check_gpucheck("10.0.0.1", 1, printed)
    assert finding.verdict is FAILURE and "scores dense float32 value 0.5" in finding.found
    good = checks.check_gpucheck("10.0.0.1", 0, "14 rows: 14 passed, 0 failed, 0 skipped\n")
    assert good.verdict is OK and good.found == "14 rows: 14 passed, 0 failed, 0 skipped"


def test_a_directory_below_a_file_cannot_be_written(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    assert "NotADirectoryError" in str(path_facts("tmp", str(tmp_path / "file" / "below")).error)
    assert path_facts("tmp", str(tmp_path / "new" / "below")).error is None
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_the_table_has_the_advice_below_its_line() -> None:
    findings = [Finding("gpus", "10.0.0.1", OK, "8"), Finding("clock", "10.0.0.2", FAILURE, "+90 s", "start chrony")]
    assert table(findings).splitlines() == [
        "check  node      verdict  found",
        "gpus   10.0.0.1  ok       8",
        "clock  10.0.0.2  FAILURE  +90 s",
        "    -> start chrony",
        "2 checks: 1 ok, 0 warning, 1 FAILURE",
    ]
