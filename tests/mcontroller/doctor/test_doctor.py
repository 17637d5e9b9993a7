"""``doctor`` on a real cluster of two raylets, and on this machine alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mcontroller.cli.main import main
from mcontroller.doctor.node import NodeAgent
from tests.mcontroller.doctor.two_raylets import ADDRESS


@pytest.mark.processes
def test_faults_of_one_node_of_a_cluster_are_found_on_that_node(tmp_path: Path) -> None:
    directory = tempfile.mkdtemp(prefix="doctor")  # a short name: Ray puts its sockets there
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": directory}
    environment.pop("RAY_ADDRESS", None)
    written = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "tests.mcontroller.doctor.two_raylets"]
    options = ["--checkpoints", str(tmp_path / "checkpoints"), "--json", str(written)]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=200)
    shutil.rmtree(directory, ignore_errors=True)
    assert done.returncode == 1, done.stdout + done.stderr
    findings = json.loads(written.read_text())["findings"]
    failed = {(row["check"], row["node"]) for row in findings if row["verdict"] == "FAILURE"}
    assert failed == {("threads", ADDRESS), ("interfaces", ADDRESS), ("gpus", ADDRESS)}, done.stdout
    of_cluster = {row["check"]: row["verdict"] for row in findings if row["node"] == "all"}
    assert of_cluster == {"versions": "ok", "shared checkpoints": "ok"}
    reached = {row["facts"] for row in findings if row["check"] == "ports"}
    assert len(reached) == 2 and f"reaches {ADDRESS}" in reached
    assert {row["verdict"] for row in findings if row["check"] == "clock"} == {"ok"}


def test_this_machine_is_checked_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--local", "--checkpoints", str(tmp_path)]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("this machine; it runs no Ray cluster")
    for check in ("packages", "gpus", "shared memory", "ulimit nofile", "threads", "path"):
        assert any(f" {check} " in line for line in lines)


def test_an_address_without_a_cluster_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--address", "no address"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("doctor: no Ray cluster answers at no address: ")
    assert printed.err.count("\n") == 1


def test_agents_reach_each_other_and_report_why_they_do_not() -> None:
    listening, connecting = NodeAgent("127.0.0.1"), NodeAgent("127.0.0.1")
    port = listening.listen()
    assert connecting.connect("127.0.0.1", port, 5.0) is None
    assert connecting.connect("127.0.0.1", 1, 5.0) == "Connection refused"
