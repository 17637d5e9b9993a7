"""Every check of a node: right facts are ok, a wrong one has a verdict."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mcontroller.doctor.verb import FAILURE, OK, WARNING, NodeFacts, check_node, check_versions, selects_interface

GIB = 1 << 30
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "megatron-core": "0.16.1", "tensordict": "0.15.3", "driver": "570.1"}
GPUS = {"driver": 8, "torch": 8, "Ray": 8}
INTERFACES = ("lo", "eth0", "ib0", "ib1")
NODE = NodeFacts(VERSIONS, GPUS, 200 * GIB, object_store=100 * GIB, open_files=1 << 20, interfaces=INTERFACES)


def node(**changes: Any) -> NodeFacts:
    return dataclasses.replace(NODE, **changes)


@pytest.mark.parametrize(
    ("check", "facts", "verdict"),
    [
        ("packages", node(versions={"torch": "2.13.0", "tensordict": "0.15.3"}), FAILURE),
        ("packages", node(versions=VERSIONS | {"torch": "broken: libcudart.so.12"}), FAILURE),
        ("packages", node(versions=VERSIONS | {"driver": "broken: version mismatch"}), FAILURE),
        ("gpus", node(gpus=GPUS | {"torch": 0, "Ray": 0}), FAILURE),
        ("gpus", node(gpus=GPUS | {"Ray": 16}), FAILURE),
        ("gpus", node(gpus=GPUS | {"Ray": 4}), WARNING),
        ("gpus", node(gpus=GPUS | {"torch": 7, "Ray": 7}), WARNING),
        ("shared memory", node(shared_memory=64 << 20), FAILURE),
        ("shared memory", node(shared_memory=50 * GIB), WARNING),
        ("open files", node(open_files=1024), FAILURE),
        ("open files", node(open_files=20000), WARNING),
        ("interfaces", node(variables={"NCCL_SOCKET_IFNAME": "bond0"}), FAILURE),
        ("interfaces", node(variables={"GLOO_SOCKET_IFNAME": "ib"}), FAILURE),
    ],
)
def test_a_wrong_fact_has_a_verdict(check: str, facts: NodeFacts, verdict: str) -> None:
    [wrong] = [finding for finding in check_node("10.0.0.1", facts) if finding.verdict != OK]
    assert (wrong.check, wrong.verdict, wrong.node) == (check, verdict, "10.0.0.1")


@pytest.mark.parametrize(
    "facts", [NODE, node(variables={"NCCL_SOCKET_IFNAME": "ib"}), node(gpus={"driver": 0, "torch": 0}, open_files=-1)]
)
def test_a_good_node_is_ok_in_everything(facts: NodeFacts) -> None:
    assert {finding.verdict for finding in check_node("10.0.0.1", facts)} == {OK}


@pytest.mark.parametrize(
    ("value", "selects"),
    [("eth", True), ("ib7,eth0", True), ("=ib", False), ("=ib1", True), ("^lo,ib,eth", False), ("^=ib0", True)],
)
def test_interfaces_are_selected_as_nccl_does(value: str, selects: bool) -> None:
    assert selects_interface(value, INTERFACES) is selects


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [({}, OK), ({"torch": "2.12.1"}, FAILURE), ({"CUDA": "13.0"}, FAILURE), ({"driver": "560.2"}, WARNING)],
)
def test_versions_that_differ_between_nodes_have_a_verdict(changes: dict[str, str], verdict: str) -> None:
    finding = check_versions({"10.0.0.1": NODE, "10.0.0.2": node(versions=VERSIONS | changes)})
    assert (finding.verdict, finding.node) == (verdict, "all")
