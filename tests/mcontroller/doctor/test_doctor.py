"""``doctor`` on a real cluster of two raylets, and on this machine alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from mcontroller.cli.main import main
from mcontroller.doctor.verb import FAILURE, OK, NodeAgent, findings_of
from tests.mcontroller.doctor.two_raylets import ADDRESS


@pytest.mark.processes
def test_faults_of_one_node_of_a_cluster_are_reported_for_that_node(tmp_path: Path) -> None:
    directory = tempfile.mkdtemp(prefix="doctor")  # a short name: Ray puts its sockets there
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": directory}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "tests.mcontroller.doctor.two_raylets"]
    options = ["--checkpoints", str(tmp_path / "checkpoints")]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=200)
    shutil.rmtree(directory, ignore_errors=True)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:] if not line.startswith(" ")]
    assert {(row[2], row[1]) for row in rows if row[0] == FAILURE} == {("interfaces", ADDRESS), ("gpus", ADDRESS)}
    verdicts = [(row[2], row[0]) for row in rows if row[2] in ("versions", "ports", "checkpoints")]
    assert verdicts == [("versions", OK), ("ports", OK), ("ports", OK), ("checkpoints", OK)]


def test_this_machine_is_checked_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--local", "--checkpoints", str(tmp_path)]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    for check in ("packages", "gpus", "shared memory", "open files", "checkpoints"):
        assert any(f" {check} " in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_an_address_without_a_cluster_has_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--address", "no address"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1


def test_agents_reach_each_other_and_report_why_they_do_not() -> None:
    listening, connecting = NodeAgent(), NodeAgent()
    port = listening.listen()
    assert connecting.unreachable({"127.0.0.1": port}) == {}
    assert list(connecting.unreachable({"127.0.0.1": 1})) == ["127.0.0.1:1"]


def test_a_node_that_does_not_answer_and_directories_that_differ_fail(tmp_path: Path) -> None:
    """Each node sees its directory of checkpoints in another place; the third one does not answer."""

    class Node(NodeAgent):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def has(self, path: str) -> bool:
            return super().has(str(Path(path).parent / self.name / Path(path).name))

    def lost(method: str, *arguments: object) -> object:
        raise ConnectionError("the node is gone")

    nodes = {name: partial(_call, Node(name)) for name in ("", "other")}
    findings = list(findings_of({**nodes, "gone": lost}, str(tmp_path)))
    failed = {(finding.check, finding.node) for finding in findings if finding.verdict == FAILURE}
    assert failed >= {("agent", "gone"), ("checkpoints", "all")}

    facts = {finding.check: (finding.verdict, finding.facts) for finding in findings if finding.node == "all"}
    assert facts["versions"][0] == OK and "other" in facts["checkpoints"][1]


def _call(agent: NodeAgent, method: str, *arguments: object) -> object:
    return getattr(agent, method)(*arguments)
