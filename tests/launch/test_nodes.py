"""The helpers of the launch files: the address of a node, and the nodes that a cluster lacks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

import launch.ray_nodes
from launch.ray_nodes import lost, missing_nodes
from tests.launch.manifests import ROOT


def test_nodes_that_never_joined_or_died_are_missing() -> None:
    nodes = [{"NodeName": "a", "Alive": True}, {"NodeName": "b", "Alive": False}]
    assert missing_nodes(["a", "b", "c"], nodes) == ["b", "c"]
    joined_again = {"NodeName": "b", "Alive": True}
    assert missing_nodes(["a", "b"], [*nodes, joined_again]) == []


def test_a_node_is_lost_before_the_head_has_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as raylet, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nothing listens there: connections are refused
        nodes = [
            {"NodeName": name, "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
            for name, port in (("a", raylet.getsockname()[1]), ("b", closed.getsockname()[1]))
        ]
        monkeypatch.setattr(launch.ray_nodes.ray, "nodes", lambda: nodes)
        assert lost(["a"]) == 0
        assert lost(["a", "b"]) == 1
    assert capsys.readouterr().out == "node b (127.0.0.1)\n"


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


@pytest.mark.processes
def test_other_machines_get_the_settings_of_nccl_and_no_token(tmp_path: Path) -> None:
    """The daemons are replaced by nothing, and ssh by a program that prints the remote command."""
    (tmp_path / "ray_node.sh").write_text("#!/bin/sh\necho 127.0.0.1\n")
    (tmp_path / "ray_nodes.py").write_text("")
    (tmp_path / "ray_node.sh").chmod(0o755)
    (tmp_path / "hosts.txt").write_text("first\nsecond\n")
    (tmp_path / "ssh.sh").write_text(
        '#!/bin/sh\necho "$@"\ncat > /dev/null\n'
    )  # reads its input to the end, as ssh does
    (tmp_path / "ssh.sh").chmod(0o755)
    given = {"NCCL_IB_HCA": "mlx5_0:1", "NCCL_IB_GID_INDEX": "3", "GLOO_SOCKET_IFNAME": "bond0", "HF_TOKEN": "secret"}
    settings = {"LAUNCH_DIR": str(tmp_path), "JOB_DIR": str(tmp_path / "job"), "SSH": str(tmp_path / "ssh.sh"), **given}
    command = [ROOT / "launch" / "ssh.sh", tmp_path / "hosts.txt", "true"]
    subprocess.run(command, env={**os.environ, **settings}, check=True, timeout=60)
    remote = (tmp_path / "job" / "ray-second.log").read_text().split()
    assert {f"{name}={value}" for name, value in given.items() if name != "HF_TOKEN"} <= set(remote)
    assert not any("secret" in word for word in remote)


@pytest.mark.processes
def test_a_connection_that_ends_at_once_is_named(tmp_path: Path) -> None:
    (tmp_path / "ray_node.sh").write_text("#!/bin/sh\necho 127.0.0.1\n")
    (tmp_path / "ray_node.sh").chmod(0o755)
    (tmp_path / "hosts.txt").write_text("first\nsecond\n")
    (tmp_path / "cat").write_text('#!/bin/sh\nsleep 1\nexec /bin/cat "$@"\n')  # the token comes after the end
    (tmp_path / "cat").chmod(0o755)
    settings = {"LAUNCH_DIR": str(tmp_path), "JOB_DIR": str(tmp_path / "job"), "SSH": "false"}
    settings["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    command = [ROOT / "launch" / "ssh.sh", tmp_path / "hosts.txt", "true"]
    run = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert f"the connection to second ended; {tmp_path}/job/ray-second.log" in run.stderr
