"""``doctor`` on a cluster of two raylets, and each of its checks with a fault."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from mcontroller.cli.doctor import NodeAgent, check_shared_memory, check_versions, findings_of
from mcontroller.cli.main import main
from tests.mcontroller.cli.two_raylets import ADDRESS

MIB = 1 << 20


@pytest.mark.processes
def test_another_version_on_one_node_of_a_cluster_fails_and_names_the_node(tmp_path: Path) -> None:
    other = tmp_path / "packages" / "tensordict-0.0.1.dist-info" / "METADATA"
    other.parent.mkdir(parents=True)
    other.write_text("Metadata-Version: 2.1\nName: tensordict\nVersion: 0.0.1\n")
    directory = tempfile.mkdtemp(prefix="doctor")  # a short name: Ray puts its sockets there
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": directory}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "tests.mcontroller.cli.two_raylets", str(tmp_path / "packages")]
    options = ["--checkpoints", str(tmp_path / "checkpoints")]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=200)
    shutil.rmtree(directory, ignore_errors=True)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines() if not line.startswith(" ")]
    [(_, node, check, facts)] = [row for row in rows if row[0] == "FAILURE"]
    assert (node, check) == ("all", "versions")
    assert "tensordict" in facts and f"'{ADDRESS}': '0.0.1'" in facts and "torch" not in facts
    checks = [row[2] for row in rows if row[0] == "ok" and row[2] != "shared"]
    assert checks == ["ports", "ports", "checkpoints"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_an_address_without_a_cluster_has_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--address", "no address"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("other", "failed"),
    [
        ({"torch": "2.13.0", "NCCL": "2.28.9"}, False),
        ({"torch": "2.12.1", "NCCL": "2.28.9"}, True),
        ({"torch": "2.13.0"}, True),
    ],
)
def test_versions_that_differ_or_are_missing_on_a_node_fail(other: dict[str, str], failed: bool) -> None:
    assert check_versions({"10.0.0.1": {"torch": "2.13.0", "NCCL": "2.28.9"}, "10.0.0.2": other}).failed is failed


@pytest.mark.parametrize(("size", "has_driver", "failed"), [(64, True, True), (64, False, False), (16384, True, False)])
def test_little_shared_memory_fails_on_a_node_with_gpus(size: int, has_driver: bool, failed: bool) -> None:
    assert check_shared_memory("10.0.0.1", size * MIB, has_driver).failed is failed


def test_agents_reach_each_other_and_report_why_they_do_not() -> None:
    listening, connecting = NodeAgent(), NodeAgent()
    port = listening.listen()
    assert connecting.unreachable({"127.0.0.1": port}) == {}
    assert list(connecting.unreachable({"127.0.0.1": 1})) == ["127.0.0.1:1"]


def test_a_node_that_does_not_answer_and_directories_that_differ_fail(tmp_path: Path) -> None:
    """Each node sees its directory of checkpoints in another place; the third one does not answer."""

    class Node(NodeAgent):
        def __init__(self, name: str) -> None:
            self.name = name

        def has(self, path: str) -> bool:
            return super().has(str(Path(path).parent / self.name / Path(path).name))

    def lost(method: str, *arguments: object) -> object:
        raise ConnectionError("the node is gone")

    nodes = {"127.0.0.1": partial(_call, Node(".")), "127.0.0.2": partial(_call, Node("other"))}
    findings = list(findings_of({**nodes, "gone": lost}, str(tmp_path)))
    failed = {finding.check: finding for finding in findings if finding.failed}
    assert failed.keys() == {"agent", "checkpoints"}
    assert failed["agent"].node == "gone" and "127.0.0.2" in failed["checkpoints"].facts


def _call(agent: NodeAgent, method: str, *arguments: object) -> object:
    return getattr(agent, method)(*arguments)
