"""The helpers of the launch files: the address of a node, and the nodes that a cluster lacks."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from launch.ray_nodes import missing_nodes
from tests.launch.manifests import ROOT


def test_nodes_that_never_joined_or_died_are_missing() -> None:
    nodes = [{"NodeName": "a", "Alive": True}, {"NodeName": "b", "Alive": False}]
    assert missing_nodes(["a", "b", "c"], nodes) == ["b", "c"]
    joined_again = {"NodeName": "b", "Alive": True}
    assert missing_nodes(["a", "b"], [*nodes, joined_again]) == []


needs_ip = pytest.mark.skipif(shutil.which("ip") is None, reason="INTERFACE needs the command ip, of iproute2")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("settings", "address"),
    [
        pytest.param({"INTERFACE": "lo"}, "127.0.0.1", marks=needs_ip),
        ({"NODE_ADDRESS": "127.0.1.2"}, "127.0.1.2"),
    ],
)
def test_the_address_of_a_node_is_that_of_its_interface_or_the_given_one(
    settings: dict[str, str], address: str
) -> None:
    run = address_of(**settings)
    assert (run.returncode, run.stdout) == (0, f"{address}\n")


@pytest.mark.processes
def test_a_name_of_loopback_is_replaced_by_an_address_that_nodes_reach() -> None:
    assert not address_of(NODE_ADDRESS="localhost").stdout.startswith("127.")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"INTERFACE": "nowhere0"}, "node n1 has no IPv4 address (INTERFACE=nowhere0"),
        ({"NODE_ADDRESS": "nowhere.invalid"}, "name nowhere.invalid"),
    ],
)
def test_a_node_without_an_address_is_reported(settings: dict[str, str], named: str) -> None:
    run = address_of(NODE_NAME="n1", **settings)
    assert run.returncode == 1 and named in run.stderr


def address_of(**settings: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "launch" / "ray_node.sh", "address"]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=30)
