"""Every check of doctor: right facts are ok, a wrong one has a verdict and an advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mcontroller.doctor import checks
from mcontroller.doctor.checks import FAILURE, OK, WARNING, exit_status
from mcontroller.doctor.node import NodeFacts, free_bytes

GIB = 1 << 30
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "megatron-core": "0.16.1", "tensordict": "0.15.3", "driver": "570.1"}
NODE = NodeFacts(
    address="10.0.0.1",
    versions=VERSIONS,
    driver_gpus=("NVIDIA H200",) * 8,
    torch_gpus=8,
    ray_gpus=8,
    cores=64,
    shared_memory=200 * GIB,
    object_store=100 * GIB,
    limits={"nofile": 1 << 20, "nproc": -1, "memlock": -1},
    interfaces=("lo", "eth0", "ib0", "ib1"),
    free={"/tmp": 500 * GIB},
)
FEW = {"nofile": 1024, "nproc": -1, "memlock": -1}


def node(**changes: Any) -> NodeFacts:
    return dataclasses.replace(NODE, **changes)


@pytest.mark.parametrize(
    ("check", "facts", "verdict"),
    [
        ("packages", node(versions={"torch": "2.13.0", "tensordict": "0.15.3"}), FAILURE),
        ("packages", node(versions=VERSIONS | {"torch": "broken: OSError: libcudart.so.12"}), FAILURE),
        ("packages", node(versions=VERSIONS | {"driver": "broken: version mismatch"}), FAILURE),
        ("gpus", node(torch_gpus=0, ray_gpus=0), FAILURE),
        ("gpus", node(ray_gpus=16), FAILURE),
        ("gpus", node(ray_gpus=4), WARNING),
        ("gpus", node(torch_gpus=7, ray_gpus=7), WARNING),
        ("shared memory", node(shared_memory=64 << 20), FAILURE),
        ("shared memory", node(shared_memory=50 * GIB), WARNING),
        ("ulimit nofile", node(limits=FEW), FAILURE),
        ("ulimit nofile", node(limits=FEW | {"nofile": 20000}), WARNING),
        ("ulimit nproc", node(limits={"nproc": 512}), FAILURE),
        ("ulimit memlock", node(limits={"memlock": 64 << 10}), WARNING),
        ("threads", node(variables={"OMP_NUM_THREADS": "9"}), FAILURE),
        ("threads", node(variables={"OMP_NUM_THREADS": "all"}), FAILURE),
        ("threads", node(ray_gpus=None), FAILURE),
        ("threads", node(cores=4), WARNING),
        ("interfaces", node(variables={"NCCL_SOCKET_IFNAME": "bond0"}), FAILURE),
        ("interfaces", node(variables={"GLOO_SOCKET_IFNAME": "ib"}), FAILURE),
        ("path", node(free={"/shared": "OSError: Read-only file system"}), FAILURE),
        ("path", node(free={"/tmp": 100 << 20}), FAILURE),
        ("path", node(free={"/tmp": 5 * GIB}), WARNING),
    ],
)
def test_a_wrong_fact_has_a_verdict_and_an_advice(check: str, facts: NodeFacts, verdict: str) -> None:
    [wrong] = [finding for finding in checks.check_node(facts, ranks=8) if finding.verdict != OK]
    assert (wrong.check, wrong.verdict, wrong.node) == (check, verdict, "10.0.0.1") and wrong.advice
    assert exit_status([wrong]) == int(verdict == FAILURE)


@pytest.mark.parametrize("variables", [{}, {"OMP_NUM_THREADS": "8"}, {"NCCL_SOCKET_IFNAME": "ib"}])
def test_a_good_node_is_ok_in_everything(variables: dict[str, str]) -> None:
    findings = list(checks.check_node(node(variables=variables), ranks=None))
    assert {(finding.verdict, finding.advice) for finding in findings} == {(OK, "")} and exit_status(findings) == 0


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
    assert checks.interfaces_named(value, NODE.interfaces) == chosen


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({}, {"versions": OK}),
        ({"versions": VERSIONS | {"torch": "2.12.1"}}, {"versions torch": FAILURE}),
        ({"versions": VERSIONS | {"driver": "560.2"}}, {"versions driver": WARNING}),
        ({"driver_gpus": ("NVIDIA A100",) * 8}, {"versions GPU": WARNING}),
    ],
)
def test_versions_that_differ_between_nodes_are_named(changes: dict[str, Any], verdicts: dict[str, str]) -> None:
    findings = checks.check_versions([NODE, node(address="10.0.0.2", **changes)])
    assert {finding.check: finding.verdict for finding in findings} == verdicts


@pytest.mark.parametrize(
    ("skew", "uncertainty", "verdict"),
    [(0.4, 0.01, OK), (-3.0, 0.01, WARNING), (3.0, 2.5, OK), (-3600.0, 0.1, FAILURE)],
)
def test_clocks_that_differ_are_reported(skew: float, uncertainty: float, verdict: str) -> None:
    assert checks.check_clock("10.0.0.1", skew, uncertainty).verdict == verdict


def test_a_directory_that_is_not_shared_fails() -> None:
    assert checks.check_shared_directory("/shared", {"10.0.0.1": True, "10.0.0.2": True}).verdict == OK
    finding = checks.check_shared_directory("/shared", {"10.0.0.1": True, "10.0.0.2": False})
    assert finding.verdict == FAILURE and "10.0.0.2" in finding.facts and "10.0.0.1" not in finding.facts


def test_a_directory_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "NotADirectoryError" in str(free_bytes(str(tmp_path / "file" / "below")))
    assert isinstance(free_bytes(str(tmp_path)), int)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
